"""The systems that `rksc bench branches` compares, one file each.

A system is a :class:`~rksc_agents.bench.peers.system.System` in a module of its own; to add one, write it and name it
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents.bench.peers.system import System

SYSTEMS: Mapping[str, str] = MappingProxyType(
    {
        "no-kv": "no_kv:NoKV",
        "transformers": "generate:Generate",
        "vllm": "vllm:VLLM",
        "llama.cpp": "llama_cpp:LlamaCpp",
        "rksc": "rksc:Rksc",
        "rksc-int8": "rksc_int8:RkscInt8",
        "rksc-cgee": "rksc_cgee:RkscCgee",
        "rksc-adaptive": "rksc_adaptive:RkscAdaptive",
    }
)
"""The systems by name, each with its module and class. They are imported when they are used."""


def systems_of(names: Sequence[str]) -> list[type[System]]:
    """The systems of these names, in this order.

    Raises
    ------
    ConfigError
        If a name is unknown or comes twice, or there is none.
    """
    known = ", ".join(SYSTEMS)
    if not names:
        raise ConfigError(f"no system is named: give some of {known}")
    for name in names:
        if name not in SYSTEMS:
            raise ConfigError(f"system {name!r} is unknown: give some of {known}")
        if list(names).count(name) > 1:
            raise ConfigError(f"system {name!r} is named twice: name each once")
    return [_found(SYSTEMS[name]) for name in names]


def _found(place: str) -> type[System]:
    module, _, name = place.partition(":")
    found: type[System] = getattr(import_module(f"{__name__}.{module}"), name)
    return found
