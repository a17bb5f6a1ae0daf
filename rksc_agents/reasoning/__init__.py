"""What to think: strategies as coroutines over the engine's verbs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rksc_agents.reasoning.beam_search import BeamSearch
from rksc_agents.reasoning.best_of_n import BestOfN
from rksc_agents.reasoning.direct import Direct
from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.self_consistency import SelfConsistency
from rksc_agents.reasoning.strategy import Outcome, Strategy
from rksc_agents.reasoning.tree_of_thought import TreeOfThought

STRATEGIES: Mapping[str, type[Strategy]] = MappingProxyType(
    {strategy.name: strategy for strategy in (Direct, SelfConsistency, BestOfN, TreeOfThought, BeamSearch)}
)
"""The strategies by name."""

__all__ = [
    "STRATEGIES",
    "BeamSearch",
    "BestOfN",
    "Direct",
    "Outcome",
    "Problem",
    "SelfConsistency",
    "Strategy",
    "TreeOfThought",
]
