"""What one request took, counted while it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rksc_agents.cache.tree import Node
from rksc_agents.engine.cursor import Cursor
from rksc_agents.trace import KVSample, Span, SpanKind
from rksc_agents.types import KVUsage

_SAMPLES = 256  # of the KV held over time, at most


@dataclass(slots=True, eq=False)
class Ledger:
    """Tokens, bytes and seconds of one request.

    Attributes
    ----------
    prompt_tokens, prompt_tokens_reused : int
        Tokens that prefills asked for, and how many of them the tree had.
    kv : KVUsage
        Peaks so far.
    spans : list of Span
        What was waited for, in the order in which it ended.
    samples : list of KVSample
        The KV held over time; where there are too many, every other one is dropped.
    """

    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    prompt_tokens: int = 0
    prompt_tokens_reused: int = 0
    completion_tokens: int = 0
    probe_tokens: int = 0
    kv: KVUsage = field(default_factory=KVUsage)
    recomputed: int = 0
    cursors: set[Cursor] = field(default_factory=set)
    """What the request has claimed and not released."""
    spans: list[Span] = field(default_factory=list)
    samples: list[KVSample] = field(default_factory=list)
    _every: int = 1
    _seen: int = 0

    def start(self) -> None:
        """Note the first step that worked for this request."""
        if self.started is None:
            self.started = time.perf_counter()

    def finished(self) -> list[Node]:
        """The ends of branches that are done and still claimed."""
        return [cursor.node for cursor in self.cursors if cursor.depth and cursor.node.alive]

    @property
    def now(self) -> float:
        """Seconds since the request was submitted."""
        return time.perf_counter() - self.submitted

    @contextmanager
    def spending(self, kind: SpanKind) -> Iterator[None]:
        """Count the time that the block waits as spent on prefill, decode or verification."""
        began = self.now
        yield
        self.spent(kind, began)

    def spent(self, kind: SpanKind, began: float) -> None:
        """Count the time since `began`, in seconds since the request was submitted, likewise."""
        self.spans.append(Span(kind=kind, start_s=began, end_s=self.now))

    def seconds(self, kind: SpanKind) -> float:
        """Seconds spent on prefill, decode or verification; what was waited for at once counts each time."""
        return sum(span.end_s - span.start_s for span in self.spans if span.kind == kind)

    def saw(self, held: int, copied: int, shared: int, in_all: int) -> None:
        """Note the bytes held now, the bytes that copies would take, and the tokens shared; the peak is kept.

        `in_all` are the bytes that all requests and the cache hold.
        """
        if self._seen % self._every == 0:
            self.samples.append(KVSample(at_s=self.now, request_bytes=held, held_bytes=in_all))
        self._seen += 1
        if len(self.samples) > _SAMPLES:
            self.samples, self._every = self.samples[::2], 2 * self._every
        if held > self.kv.peak_bytes:
            self.kv = KVUsage(peak_bytes=held, bytes_if_copied=copied, tokens_shared=shared)
