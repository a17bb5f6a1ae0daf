"""Objects of the core as plain settings and back: what is serialized, and what tells two calls apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from rksc_agents.config import EngineConfig, Sharing
from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents import Strategy

SECRETS = ("token",)
"""Arguments of `from_pretrained` that are written down nowhere."""


def strategy_of(value: object) -> Strategy | str | None:
    """A strategy from its settings, ``{"name": ..., **settings}``; names and objects as they are.

    Raises
    ------
    ConfigError
        If there is no strategy of that name, or a setting is unknown or outside its range.
    """
    if not isinstance(value, Mapping):
        return cast("Strategy | str | None", value)
    from rksc_agents.reasoning import STRATEGIES

    settings = dict(value)
    name = settings.pop("name", None)
    if name not in STRATEGIES:
        raise ConfigError(f"strategy = {value!r}: give its 'name', one of {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[name](**settings)


def exit_of(value: object) -> Any:
    """Early exit from its settings; presets, paths and objects as they are."""
    if not isinstance(value, Mapping):
        return value
    from rksc_agents import ExitConfig

    return ExitConfig(**value)


def sharing_of(value: object) -> Any:
    """Sharing from its mode or its settings; objects as they are."""
    if isinstance(value, str):
        return Sharing(mode=value)
    return Sharing(**value) if isinstance(value, Mapping) else value


def engine_of(value: object) -> EngineConfig | None:
    """The engine's settings."""
    if value is None or isinstance(value, EngineConfig):
        return value
    if isinstance(value, Mapping):
        return EngineConfig(**value)
    raise ConfigError(f"engine = {value!r}: give an EngineConfig or its fields")


def plain(value: Any) -> Any:
    """A value as plain settings: a strategy's name, and what differs from the defaults; live objects as they are."""
    if isinstance(value, BaseModel):
        changed = {name: plain(getattr(value, name)) for name in sorted(_changed(value))}
        return {**_named(value), **changed}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items() if key not in SECRETS}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    return value


def described(value: Any) -> Any:
    """Like :func:`plain`, with every setting, and live objects told apart by their type and place in memory."""
    if isinstance(value, BaseModel):
        settings = {name: described(getattr(value, name)) for name in type(value).model_fields}
        return {"type": type(value).__qualname__, **settings}
    if isinstance(value, Mapping):
        return {str(key): described(item) for key, item in sorted(value.items(), key=str) if key not in SECRETS}
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if is_dataclass(value) and not isinstance(value, type):
        settings = {item.name: described(getattr(value, item.name)) for item in fields(value)}
        return {"type": type(value).__qualname__, **settings}
    value = plain(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    name = getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, type) or (hasattr(value, "__code__") and "<" not in name):  # a named one is found by its name
        return f"{value.__module__}.{name}"
    return f"{type(value).__module__}.{name} at {id(value):#x}"


def _changed(value: BaseModel) -> list[str]:
    """The fields that are not as their defaults."""
    items = type(value).model_fields.items()
    return [name for name, field in items if getattr(value, name) != field.get_default(call_default_factory=True)]


def _named(value: BaseModel) -> dict[str, str]:
    """The name of a strategy, which is its class's; nothing for other settings."""
    name = getattr(type(value), "name", None)
    return {"name": name} if isinstance(name, str) else {}
