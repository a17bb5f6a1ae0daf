"""Tool calls: how tools are offered, how models write calls, and how calls are read."""

from rksc_agents.model.tools.families import format_of
from rksc_agents.model.tools.formats import Parsed, ToolFormat
from rksc_agents.model.tools.spec import Tool, canonical_calls, choice_of, tools_of

__all__ = ["Parsed", "Tool", "ToolFormat", "canonical_calls", "choice_of", "format_of", "tools_of"]
