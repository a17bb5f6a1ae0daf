"""The fields of a model object: what is asked of which model, checked at construction, and written down as settings.

Chat model and text model share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from langchain_core.language_models.base import LangSmithParams
from langchain_core.load.serializable import Serializable
from pydantic import ConfigDict, Field, ValidationError, model_validator

import rksc_agents
from langchain_rksc.call import SETTINGS, Call
from rksc_agents.adapter.call import MADE, SAMPLING
from rksc_agents.adapter.fields import check_names, check_settings, explained, injected
from rksc_agents.adapter.lazy import LazyReasoner
from rksc_agents.adapter.results import PROVIDER
from rksc_agents.adapter.settings import described, engine_of, plain
from rksc_agents.config import DEFAULT_MODEL, EngineConfig, Sharing
from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents import Certificate, ExitConfig, RKSCReasoner, Strategy

    StrategyLike = Strategy | str | Mapping[str, Any]
    ExitLike = ExitConfig | Certificate | str | Mapping[str, Any]
    SharingLike = Sharing | str | Mapping[str, Any]
    EngineLike = EngineConfig | Mapping[str, Any]
else:  # what would name them imports torch
    StrategyLike = ExitLike = SharingLike = EngineLike = Any

_HIDDEN = ("shared_engine",)


class ModelFields(Serializable):
    """Fields and habits of model objects; see :class:`~langchain_rksc.chat_models.ChatRKSC`."""

    model: str = Field(default=DEFAULT_MODEL, alias="model_name")
    strategy: StrategyLike | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    seed: int | None = None
    n: int = Field(default=1, ge=1, le=1024)
    logprobs: bool = False
    sharing: SharingLike | None = None
    exit: ExitLike | None = None
    engine: EngineLike | None = None
    load_kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    stream_reasoning: bool = False
    streaming: bool = False
    shared_engine: LazyReasoner | None = Field(default=None, exclude=True, repr=False)

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, arbitrary_types_allowed=True, validate_default=False
    )

    def __init__(self, *, reasoner: RKSCReasoner | None = None, **fields: Any) -> None:
        known = [name for name in sorted(self._names()) if name not in _HIDDEN]
        check_names(type(self).__name__, fields.keys() - set(_HIDDEN), [*known, "reasoner"])
        if reasoner is not None:
            if "model_name" in fields:
                fields["model"] = fields.pop("model_name")
            fields, lazy = injected(reasoner, fields)
            fields["shared_engine"] = lazy
        for name in ("stop", "stop_sequences"):
            if isinstance(fields.get(name), str):  # a bare text would be taken apart into letters
                fields[name] = [fields[name]]
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(explained(type(self).__name__, error)) from None
        if self.shared_engine is None or not self._served():
            self.shared_engine = self._new_engine()

    @classmethod
    def _names(cls) -> set[str]:
        fields = cls.model_fields
        return {*fields, *(field.alias for field in fields.values() if field.alias)}

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        """What can be checked without loading anything is checked now."""
        check_settings({name: getattr(self, name) for name in (*SAMPLING, "sharing", "engine")})
        return self

    # -- the reasoner ---------------------------------------------------------------------------

    @property
    def reasoner(self) -> RKSCReasoner:
        """The live reasoner; the first use loads the model."""
        return self._engine.get()

    def close(self) -> None:
        """Free the model and its KV cache if it was loaded here; an injected reasoner is its owner's to close."""
        self._engine.close()

    @property
    def _engine(self) -> LazyReasoner:
        engine = self.shared_engine
        if engine is None or not self._served():  # a copy with another model
            engine = self.shared_engine = self._new_engine()
        return engine

    def _served(self) -> bool:
        engine = self.shared_engine
        return engine is not None and engine.serves(self.model, self.load_kwargs, engine_of(self.engine))

    def _new_engine(self) -> LazyReasoner:
        return LazyReasoner(self.model, self.load_kwargs, engine_of(self.engine))

    # -- one call -------------------------------------------------------------------------------

    def _call(self, stop: list[str] | None, given: Mapping[str, Any]) -> Call:
        own = {name: getattr(self, name) for name in SETTINGS}
        return Call.of(own, self.model, stop, given, type(self).__name__)

    # -- what is written down -------------------------------------------------------------------

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Settings are serialized, live objects are not."""
        return True

    @property
    def lc_attributes(self) -> dict[str, Any]:
        """Objects of the core as plain settings."""
        names = ("strategy", "sharing", "exit", "engine", "load_kwargs")
        return {name: plain(getattr(self, name)) for name in names if getattr(self, name)}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that answers depend on: the model and how it is loaded, strategy, sampling, sharing and early exit."""
        own = {name: getattr(self, name) for name in SETTINGS}
        own |= {name: made(own[name]) for name, made in MADE.items()}
        return {**self._identity(), **{name: described(value) for name, value in own.items()}}

    def _identity(self) -> dict[str, Any]:
        """What identifies the model, and what holds where neither object nor call says otherwise."""
        identity = {"model": self.model, "load_kwargs": described(self.load_kwargs), "version": rksc_agents.__version__}
        if (reasoner := self._engine.injected) is not None:
            own: dict[str, Any] = {"strategy": reasoner.strategy, "sampling": reasoner.sampling}
            own |= {"sharing": reasoner.sharing, "exit": reasoner.exit}
            identity |= {"model_hash": reasoner.model_hash, "reasoner": described(own)}
        return identity

    def _traced(self, kind: str, stop: list[str] | None, given: Mapping[str, Any]) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider=PROVIDER,
            ls_model_name=given.get("model") or self.model,
            ls_model_type=kind,  # type: ignore[typeddict-item]
        )
        temperature, max_tokens = (
            given.get(name) if given.get(name) is not None else getattr(self, name)
            for name in ("temperature", "max_tokens")
        )
        if temperature is not None:
            params["ls_temperature"] = temperature
        if max_tokens is not None:
            params["ls_max_tokens"] = max_tokens
        if stops := stop if stop is not None else self.stop:
            params["ls_stop"] = stops
        return params
