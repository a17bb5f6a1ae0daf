"""What model objects of all frameworks do with the fields they are made of."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rksc_agents.adapter.call import SAMPLING
from rksc_agents.adapter.lazy import LazyReasoner
from rksc_agents.adapter.settings import engine_of, sharing_of
from rksc_agents.config import Sampling
from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents import RKSCReasoner


def check_names(owner: str, given: Collection[str], known: Collection[str], what: str = "") -> None:
    """Refuse names that are not known.

    Raises
    ------
    ConfigError
        If there are some.
    """
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(f"{what}{owner} has no argument {', '.join(map(repr, unknown))}; it takes {', '.join(known)}")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Check what can be checked without loading a model.

    Raises
    ------
    ConfigError
        If a setting is unknown or outside its range.
    """
    Sampling(**{name: settings[name] for name in SAMPLING if settings.get(name) is not None})
    sharing_of(settings.get("sharing"))
    engine_of(settings.get("engine"))


def injected(reasoner: RKSCReasoner, fields: Mapping[str, Any]) -> tuple[dict[str, Any], LazyReasoner]:
    """The fields of an object on a live reasoner, and what holds that.

    Raises
    ------
    ConfigError
        If fields say what to load as well.
    """
    for name in ("engine", "load_kwargs"):
        if fields.get(name):
            raise ConfigError(f"{name} = {fields[name]!r} goes with a model that is loaded, not with a reasoner")
    if fields.get("model") not in (None, reasoner.name):
        raise ConfigError(f"model = {fields['model']!r} with a reasoner of {reasoner.name!r}: leave model out")
    return {**fields, "model": reasoner.name}, LazyReasoner.of(reasoner)


def explained(owner: str, error: ValidationError) -> str:
    """What is wrong with an object's fields, in one line."""
    lines = []
    for item in error.errors():
        name = ".".join(map(str, item["loc"]))
        reason = re.sub("^Value error, ", "", item["msg"])
        lines.append(f"{owner}.{name} = {item['input']!r}: {reason}" if name else reason)
    return "; ".join(lines)
