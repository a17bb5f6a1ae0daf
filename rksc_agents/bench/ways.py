"""The ways to answer that `rksc bench accuracy` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rksc_agents.errors import ConfigError
from rksc_agents.reasoning import BestOfN, Direct, SelfConsistency, Strategy


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy with its shortcuts.

    Attributes
    ----------
    strategy : callable
        Makes the strategy for a number of branches.
    early : bool, default False
        Whether verification may be skipped or stop early.
    greedy : bool, default False
        Whether the likeliest tokens are taken instead of drawn ones.
    reference : str or None, default None
        The way without shortcuts that this one is to agree with; None where it has none itself.
    """

    strategy: Callable[[int], Strategy]
    early: bool = False
    greedy: bool = False
    reference: str | None = None


def _by_verdict(branches: int) -> Strategy:
    return SelfConsistency(branches=branches, vote="verifier", stop=None)


def _adaptive(branches: int) -> Strategy:
    warmup = max(2, branches // 4) if branches > 2 else None
    return SelfConsistency(branches=branches, vote="verifier", stop=None, warmup=warmup)


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "direct": Way(lambda _: Direct(), greedy=True),
        "majority": Way(lambda branches: SelfConsistency(branches=branches, vote="majority", stop=None)),
        "majority-decided": Way(
            lambda branches: SelfConsistency(branches=branches, vote="majority"), reference="majority"
        ),
        "verifier": Way(_by_verdict),
        "verifier-cgee": Way(_by_verdict, early=True, reference="verifier"),
        "verifier-adaptive": Way(_adaptive, early=True, reference="verifier"),
        "best-of-n": Way(lambda branches: BestOfN(branches=branches, score="verifier")),
        "best-of-n-cgee": Way(
            lambda branches: BestOfN(branches=branches, score="verifier"), early=True, reference="best-of-n"
        ),
    }
)
"""The ways by name. With equal seeds all but the adaptive one draw the same branches as their reference."""


def ways_of(names: Sequence[str]) -> dict[str, Way]:
    """The ways of these names, in this order.

    Raises
    ------
    ConfigError
        If a name is unknown or comes twice, or there is none.
    """
    for name in names:
        if name not in WAYS:
            raise ConfigError(f"way {name!r} is unknown: give some of {', '.join(WAYS)}")
        if list(names).count(name) > 1:
            raise ConfigError(f"way {name!r} is named twice: name each once")
    if not names:
        raise ConfigError(f"no way is named: give some of {', '.join(WAYS)}")
    return {name: WAYS[name] for name in names}
