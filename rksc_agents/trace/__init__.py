"""A run as something to look at: its records, its tree in a terminal, its page in a browser."""

from rksc_agents.trace.records import FORMATS, VERSION, KVSample, Span, SpanKind, State, Trace, TraceNode

__all__ = ["FORMATS", "VERSION", "KVSample", "Span", "SpanKind", "State", "Trace", "TraceNode"]
