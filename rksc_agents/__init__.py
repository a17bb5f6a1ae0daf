"""Multi-branch reasoning on local Hugging Face models: branches share one KV cache.

The front door is :class:`RKSCReasoner`; everything public is listed in ``__all__`` and loaded on first
use, so that ``import rksc_agents`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rksc_agents.config import EngineConfig, Sampling
    from rksc_agents.errors import (
        ConfigError,
        ConversionError,
        EngineClosedError,
        EngineError,
        KVBudgetError,
        ModelLoadError,
        PromptTooLongError,
        RKSCError,
        UnsupportedModelError,
    )
    from rksc_agents.model.runners import PerBranchWarning
    from rksc_agents.reasoner import RKSCReasoner
    from rksc_agents.reasoning import BestOfN, Direct, Outcome, Problem, SelfConsistency, Strategy
    from rksc_agents.types import (
        Answer,
        Branch,
        BranchEnd,
        BranchToken,
        Event,
        KVUsage,
        ReasoningResult,
        Timings,
        Usage,
        Vote,
        VoteChanged,
    )

__version__ = "0.1.0"

_HOMES = {
    "rksc_agents.config": ["EngineConfig", "Sampling"],
    "rksc_agents.errors": [
        "ConfigError", "ConversionError", "EngineClosedError", "EngineError", "KVBudgetError", "ModelLoadError",
        "PromptTooLongError", "RKSCError", "UnsupportedModelError",
    ],
    "rksc_agents.model.runners": ["PerBranchWarning"],
    "rksc_agents.reasoner": ["RKSCReasoner"],
    "rksc_agents.reasoning": ["BestOfN", "Direct", "Outcome", "Problem", "SelfConsistency", "Strategy"],
    "rksc_agents.types": [
        "Answer", "Branch", "BranchEnd", "BranchToken", "Event", "KVUsage", "ReasoningResult", "Timings", "Usage",
        "Vote", "VoteChanged",
    ],
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Answer",
    "BestOfN",
    "Branch",
    "BranchEnd",
    "BranchToken",
    "ConfigError",
    "ConversionError",
    "Direct",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "Event",
    "KVBudgetError",
    "KVUsage",
    "ModelLoadError",
    "Outcome",
    "PerBranchWarning",
    "Problem",
    "PromptTooLongError",
    "RKSCError",
    "RKSCReasoner",
    "ReasoningResult",
    "Sampling",
    "SelfConsistency",
    "Strategy",
    "Timings",
    "UnsupportedModelError",
    "Usage",
    "Vote",
    "VoteChanged",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
