"""What the systems that are this package have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from transformers import PreTrainedModel

from rksc_agents.bench.peers.meter import metered
from rksc_agents.bench.peers.system import System, Took
from rksc_agents.bench.peers.weights import Weights
from rksc_agents.bench.unit import Unit
from rksc_agents.errors import ConfigError
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.reasoning import Strategy


class OwnSystem(System):
    """Asks a reasoner, whose KV tree is empty when a run begins.

    Attributes
    ----------
    early : bool
        Whether verification may be skipped or stop early, as the weights' `exit` says.
    ignores_eos : bool
        Whether branches go on after the model would end them.
    """

    needs: ClassVar[Literal["plain", "lent"] | None] = "lent"
    early: ClassVar[bool] = False
    ignores_eos: ClassVar[bool] = True

    reasoner: RKSCReasoner
    model: PreTrainedModel

    @abstractmethod
    def strategy(self, unit: Unit) -> Strategy:
        """What is asked for."""

    def lend(self, weights: Weights) -> RKSCReasoner:
        """The reasoner to ask; its model is left in `model`."""
        self.model = weights.model
        return weights.reasoner

    def describe(self) -> str:
        """What stands beside the result."""
        return f"exit {self.exit}"

    def open(self, weights: Weights, unit: Unit) -> None:
        self.exit = weights.exit if self.early else "off"
        self.reasoner = self.lend(weights)
        self.note = self.describe()
        if self.reasoner.count_prompt_tokens(unit.question) != len(unit.prompt):
            raise ConfigError("the unit was made with another tokenizer: make it with the codec of these weights")

    def run(self, unit: Unit, seed: int) -> Took:
        return self.run_together([unit], seed)

    def run_together(self, units: Sequence[Unit], seed: int) -> Took:
        """Do units of one shape at once, as questions that are in flight together.

        Their parts overlap, so with several units nothing is said of parts.
        """
        reasoner, budget = self.reasoner, self.reasoner._engine.budget
        sampling = units[0].seeded(seed).replace(ignore_eos=self.ignores_eos)
        options = {name: getattr(sampling, name) for name in type(sampling).model_fields}
        reasoner.clear_cache()
        budget.peak = budget.held
        with metered(self.model) as meter:
            began = meter.now()
            results = reasoner.batch(
                [unit.question for unit in units],
                strategy=self.strategy(units[0]),
                exit=self.exit,
                sharing="exact",
                **options,
            )
            seconds = meter.now() - began
        verdicts = [branch.verdict for result in results for branch in result.branches]
        alone = results[0].timings if len(results) == 1 else None
        return Took(
            seconds=seconds,
            scores=tuple(None if verdict is None else verdict.score for verdict in verdicts),
            tokens_computed=meter.tokens,
            kv_bytes=budget.peak,
            passes=meter.passes,
            prefill_s=None if alone is None else alone.prefill_s,
            decode_s=None if alone is None else alone.decode_s,
            verify_s=None if alone is None else alone.verify_s,
        )
