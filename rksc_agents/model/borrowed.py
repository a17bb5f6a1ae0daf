"""A model on loan: claimed by one engine, made faster, and given back as it was."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from weakref import WeakSet

from transformers import PreTrainedModel

from rksc_agents.cache.budget import Budget
from rksc_agents.config import EngineConfig
from rksc_agents.errors import ConfigError
from rksc_agents.model.int8 import int8_linears
from rksc_agents.model.linear import compiled_blocks, fast_linears
from rksc_agents.model.panels import panelled_linears
from rksc_agents.model.protocol import input_device
from rksc_agents.types import Quantization

_on_loan: WeakSet[PreTrainedModel] = WeakSet()


class BorrowedModel(ABC):
    """Base of the runners.

    Two engines on one model would switch its attention under each other's passes, so the second is refused.

    Parameters
    ----------
    model : PreTrainedModel
        In evaluation mode.
    budget : Budget
        Counts the bytes of all tails.

    Attributes
    ----------
    passes, tokens_computed : int
        Forward passes made and tokens computed in them.
    packed, panelled : frozenset of str
        Names of the linear layers that were packed, and of those that multiply in panels.
    quantization : Quantization or None
        What 8-bit weights changed, where there are any.

    Raises
    ------
    ConfigError
        If the model serves another engine, or is in training mode.
    """

    def __init__(self, model: PreTrainedModel, budget: Budget) -> None:
        if model.training:
            raise ConfigError("the model is in training mode, in which dropout makes answers random: call model.eval()")
        if model in _on_loan:
            raise ConfigError(
                "this model serves another reasoner: close() that one first, or ask it with another strategy, "
                "which every call can name"
            )
        self.model = model
        self.budget = budget
        self.device = input_device(model)
        self.passes = 0
        self.tokens_computed = 0
        self.packed: frozenset[str] = frozenset()
        self.panelled: frozenset[str] = frozenset()
        self.quantization: Quantization | None = None
        self._takes = frozenset(inspect.signature(model.forward).parameters)
        self._undo = ExitStack()
        _on_loan.add(model)
        self._undo.callback(_on_loan.discard, model)
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _prepare(self) -> None:
        """Find out what a runner needs to know of the model; if this raises, the model is free again."""

    def speed_up(self, config: EngineConfig, sample: Sequence[int]) -> None:
        """Make linear layers faster and compile blocks, as far as `config` asks for it; `sample` shows what is lost."""
        try:
            if config.int8:
                self.quantization = self._undo.enter_context(int8_linears(self.model, sample))
            self._undo.enter_context(compiled_blocks(self.model, enabled=config.compile))
            self.packed = self._undo.enter_context(fast_linears(self.model, config.fast_linears))
            self.panelled = self._undo.enter_context(panelled_linears(self.model, config.fast_linears))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the model as it was found."""
        self._undo.close()
