"""Branches with everything that calibration wants to know of them: nothing skipped, nothing stopped early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rksc_agents.errors import ConfigError, PromptTooLongError
from rksc_agents.reasoning.judging import claims_of
from rksc_agents.reasoning.problem import Problem
from rksc_agents.reasoning.strategy import Outcome, Strategy
from rksc_agents.reasoning.voting import answer_keys
from rksc_agents.types import Branch, Prompt
from rksc_agents.verify.early_exit import Record
from rksc_agents.verify.verifier import ProbingVerifier


@dataclass(frozen=True, slots=True)
class Sample:
    """One question, with all of its branches verified at full depth.

    Attributes
    ----------
    question : str or sequence of messages
    branches : tuple of Branch
    keys : tuple of int
        Equal numbers for equal answers; -1 for none.
    log_odds : Tensor [branches]
        Of YES at full depth.
    zeros : Tensor [branches]
        Log-odds at which a verdict changes sides.
    states : Tensor [branches, layers, width]
        Hidden states of the verdicts' tokens after the model's final norm.
    raw : Tensor [branches, layers]
        What the model's own head makes of them, as log-odds.
    """

    question: Prompt
    branches: tuple[Branch, ...]
    keys: tuple[int, ...]
    log_odds: Tensor
    zeros: Tensor
    states: Tensor
    raw: Tensor


class Observe(Strategy):
    """Draw branches, verify all of them and hand over what was seen.

    Parameters
    ----------
    layers : tuple of int
        The layers whose hidden states are kept, counted from 1.
    sink : callable
        Receives the :class:`Sample`, in the engine's thread.
    asking : Strategy or None, default None
        Whose hints the branches get.
    branches : int, default 4
        Branches to draw.
    """

    name: ClassVar[str] = "observe"

    layers: tuple[int, ...]
    sink: Callable[[Sample], None]
    asking: Strategy | None = None
    branches: int = Field(default=4, ge=1, le=1024)

    def prompts(self, question: Prompt, phrasings: Sequence[Prompt]) -> list[Prompt]:
        if self.asking is None:
            return super().prompts(question, phrasings)
        return self.asking.prompts(question, phrasings)

    async def solve(self, problem: Problem) -> Outcome:
        verifier = problem.settings.verifier
        if not isinstance(verifier, ProbingVerifier):
            raise ConfigError(
                f"the verifier {verifier.name!r} does not ask the reasoner's own model, so there is no layer to stop "
                "at: calibrate with SelfVerifier or JudgeVerifier"
            )
        async with problem.branching(await problem.start(self.branches)) as ended:
            async for _ in ended:
                pass
        claims = claims_of(problem, range(len(problem.branches)))
        try:
            found = await verifier.read(problem.session, claims, Record(self.layers))
        except PromptTooLongError:  # nothing to observe
            return Outcome(problem.surest(), None)
        readings = [reading for reading, _ in found]
        keys = await problem.session.call(
            answer_keys, [branch.answer for branch in problem.branches], problem.settings.reader.same
        )
        self.sink(
            Sample(
                question=problem.question,
                branches=tuple(problem.branches),
                keys=tuple(keys),
                log_odds=torch.tensor([reading.values[0] - reading.values[1] for reading in readings]),
                zeros=torch.tensor([zero for _, zero in found]),
                states=torch.stack([torch.stack([r.trace.states[at] for at in self.layers]) for r in readings]),
                raw=torch.tensor([[r.trace.log_odds[at] for at in self.layers] for r in readings]),
            )
        )
        return Outcome(problem.surest(), None)
