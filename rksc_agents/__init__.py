"""Multi-branch reasoning on local Hugging Face models: branches share one KV cache.

The front door is :class:`RKSCReasoner`; everything public is listed in ``__all__`` and loaded on first
use, so that ``import rksc_agents`` stays light.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rksc_agents.calibrator import Calibration, calibrate
    from rksc_agents.config import EngineConfig, Sampling, Sharing
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
    from rksc_agents.events import Answer, BranchEnd, BranchToken, BranchVerified, Event, VoteChanged
    from rksc_agents.model.grammar import Choice, Grammar, JSONSchema, Lark, Regex
    from rksc_agents.model.runners import PerBranchWarning
    from rksc_agents.reasoner import RKSCReasoner
    from rksc_agents.reasoning import (
        BeamSearch,
        BestOfN,
        Direct,
        Outcome,
        Problem,
        SelfConsistency,
        Strategy,
        TreeOfThought,
    )
    from rksc_agents.reasoning.judging import CertificateWarning
    from rksc_agents.request import Options
    from rksc_agents.result import ReasoningResult
    from rksc_agents.telemetry import Telemetry
    from rksc_agents.trace import Trace, TraceNode
    from rksc_agents.types import (
        Branch,
        InvalidToolCall,
        KVUsage,
        Quantization,
        Rendered,
        SharingRecord,
        Timings,
        ToolCall,
        Usage,
        Verdict,
        VerificationUsage,
        Vote,
    )
    from rksc_agents.verify.callable_verifier import CallableVerifier
    from rksc_agents.verify.certificate import Certificate
    from rksc_agents.verify.gates import ExitConfig
    from rksc_agents.verify.judge import JudgeVerifier
    from rksc_agents.verify.reward_model import RewardModelVerifier
    from rksc_agents.verify.self_verifier import SelfVerifier
    from rksc_agents.verify.verifier import Claim, Verifier

__version__ = "0.1.0"

_HOMES = {
    "rksc_agents.calibrator": ["Calibration", "calibrate"],
    "rksc_agents.config": ["EngineConfig", "Sampling", "Sharing"],
    "rksc_agents.errors": [
        "ConfigError", "ConversionError", "EngineClosedError", "EngineError", "KVBudgetError", "ModelLoadError",
        "PromptTooLongError", "RKSCError", "UnsupportedModelError",
    ],
    "rksc_agents.events": ["Answer", "BranchEnd", "BranchToken", "BranchVerified", "Event", "VoteChanged"],
    "rksc_agents.model.grammar": ["Choice", "Grammar", "JSONSchema", "Lark", "Regex"],
    "rksc_agents.model.runners": ["PerBranchWarning"],
    "rksc_agents.reasoner": ["RKSCReasoner"],
    "rksc_agents.reasoning": [
        "BeamSearch", "BestOfN", "Direct", "Outcome", "Problem", "SelfConsistency", "Strategy", "TreeOfThought",
    ],
    "rksc_agents.reasoning.judging": ["CertificateWarning"],
    "rksc_agents.request": ["Options"],
    "rksc_agents.result": ["ReasoningResult"],
    "rksc_agents.telemetry": ["Telemetry"],
    "rksc_agents.trace": ["Trace", "TraceNode"],
    "rksc_agents.types": [
        "Branch", "InvalidToolCall", "KVUsage", "Quantization", "Rendered", "SharingRecord",
        "Timings", "ToolCall", "Usage", "Verdict", "VerificationUsage", "Vote",
    ],
    "rksc_agents.verify.callable_verifier": ["CallableVerifier"],
    "rksc_agents.verify.certificate": ["Certificate"],
    "rksc_agents.verify.gates": ["ExitConfig"],
    "rksc_agents.verify.judge": ["JudgeVerifier"],
    "rksc_agents.verify.reward_model": ["RewardModelVerifier"],
    "rksc_agents.verify.self_verifier": ["SelfVerifier"],
    "rksc_agents.verify.verifier": ["Claim", "Verifier"],
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Answer",
    "BeamSearch",
    "BestOfN",
    "Branch",
    "BranchEnd",
    "BranchToken",
    "BranchVerified",
    "Calibration",
    "CallableVerifier",
    "Certificate",
    "CertificateWarning",
    "Choice",
    "Claim",
    "ConfigError",
    "ConversionError",
    "Direct",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "Event",
    "ExitConfig",
    "Grammar",
    "InvalidToolCall",
    "JSONSchema",
    "JudgeVerifier",
    "KVBudgetError",
    "KVUsage",
    "Lark",
    "ModelLoadError",
    "Options",
    "Outcome",
    "PerBranchWarning",
    "Problem",
    "PromptTooLongError",
    "Quantization",
    "RKSCError",
    "RKSCReasoner",
    "ReasoningResult",
    "Regex",
    "Rendered",
    "RewardModelVerifier",
    "Sampling",
    "SelfConsistency",
    "SelfVerifier",
    "Sharing",
    "SharingRecord",
    "Strategy",
    "Telemetry",
    "Timings",
    "ToolCall",
    "Trace",
    "TraceNode",
    "TreeOfThought",
    "UnsupportedModelError",
    "Usage",
    "Verdict",
    "VerificationUsage",
    "Verifier",
    "Vote",
    "VoteChanged",
    "__version__",
    "calibrate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
