"""One model for all systems of a comparison."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rksc_agents.config import EngineConfig
from rksc_agents.errors import ConfigError
from rksc_agents.model.protocol import context_length
from rksc_agents.model.source import resolve
from rksc_agents.model.text import TextCodec
from rksc_agents.reasoner import RKSCReasoner


@dataclass(frozen=True, slots=True)
class Places:
    """Where systems are that have environments of their own.

    Attributes
    ----------
    vllm_python : str or None
        The Python that has vLLM (`RKSC_VLLM_PYTHON`).
    llama_cpp : str or None
        The program llama-server (`RKSC_LLAMA_CPP`).
    llama_cpp_model : str or None
        A GGUF file of the same weights (`RKSC_LLAMA_CPP_MODEL`); by default the one that the model was loaded from.
    """

    vllm_python: str | None = None
    llama_cpp: str | None = None
    llama_cpp_model: str | None = None

    @classmethod
    def from_environment(cls) -> Self:
        """As the environment variables say."""
        return cls(*(os.environ.get(name) for name in ("RKSC_VLLM_PYTHON", "RKSC_LLAMA_CPP", "RKSC_LLAMA_CPP_MODEL")))

    def with_gguf_of(self, model: str) -> Self:
        """The same, and where no GGUF file is named the one that `model` is loaded from, if it is."""
        gguf = None if self.llama_cpp_model else resolve(model).gguf
        return self if gguf is None else replace(self, llama_cpp_model=str(gguf))


class Weights:
    """A model that is loaded once.

    A reasoner that is open may have packed its layers, which would slow transformers down or leave it without plain
    weights. So where both kinds of system run, transformers gets a copy of the model that nobody touches, and both are
    at their best in every round; it costs the memory of the weights a second time.

    Parameters
    ----------
    model, tokenizer
        As loaded.
    name : str
        What the user asked for.
    plain, lent : bool
        Which of the two kinds of system run.
    engine : EngineConfig or None
        Of the reasoner.
    exit : str, default "strict"
        Early exit of the systems that have it.
    places : Places or None
        Where the systems are that run outside this process; None is as the environment says.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        plain: bool = True,
        lent: bool = True,
        engine: EngineConfig | None = None,
        exit: str = "strict",
        places: Places | None = None,
    ) -> None:
        ends = model.generation_config.eos_token_id if model.generation_config is not None else None
        self.name = name
        self.codec = TextCodec(tokenizer, eos_token_ids=[ends] if isinstance(ends, int) else ends or [])
        self.context = context_length(model)
        self.exit = exit
        self.place = str(model.config._name_or_path)
        self.places = places if places is not None else Places.from_environment()
        self.model = model
        self.copied = plain and lent
        self._copies = 2 if self.copied else 1
        self._parameters = model.num_parameters()  # packed layers have none
        self._tokenizer = tokenizer
        self._plain = copy.deepcopy(model) if self.copied else model if plain else None
        self._lent = lent
        self._engine = engine
        self._reasoner: RKSCReasoner | None = None

    @property
    def plain(self) -> PreTrainedModel:
        """The model as transformers loads it, which no reasoner touches.

        Raises
        ------
        ConfigError
            If it was not asked for.
        """
        if self._plain is None:
            raise ConfigError("these weights are lent to a reasoner alone: make Weights with plain=True")
        return self._plain

    @property
    def reasoner(self) -> RKSCReasoner:
        """The reasoner of all systems that need one; made when first asked for.

        Raises
        ------
        ConfigError
            If it was not asked for.
        """
        if not self._lent:
            raise ConfigError("these weights are not to be lent to a reasoner: make Weights with lent=True")
        if self._reasoner is None:
            self._reasoner = self.reasoner_on(self.model, self._engine)
        return self._reasoner

    def copied_plain(self) -> PreTrainedModel:
        """Another copy of :attr:`plain`, for a system that changes it."""
        self._copies += 1
        return copy.deepcopy(self.plain)

    def reasoner_on(self, model: PreTrainedModel, engine: EngineConfig | None) -> RKSCReasoner:
        """A reasoner on a model of its own; whoever asks for it closes it."""
        return RKSCReasoner.from_model(model, self._tokenizer, name=self.name, exit="off", engine=engine)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token, as the reasoner stores it."""
        return self.reasoner._engine.runner.token_bytes

    def described(self) -> dict[str, Any]:
        """What runs them, as JSON values."""
        device = self.model.device
        return {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "parameters": self._parameters,
            "copies": self._copies,
        }

    def close(self) -> None:
        """Close the reasoner. Closing twice does nothing."""
        if self._reasoner is not None:
            self._reasoner.close()
            self._reasoner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
