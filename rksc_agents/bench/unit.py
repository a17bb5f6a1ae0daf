"""The unit of work that `rksc bench branches` measures: a real question, its branches, and a verdict on each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rksc_agents.bench.prompts import few_shot
from rksc_agents.config import Sampling
from rksc_agents.engine.probe import Groups
from rksc_agents.errors import ConfigError
from rksc_agents.model.text import TextCodec
from rksc_agents.questions import Question
from rksc_agents.verify.self_verifier import SelfVerifier
from rksc_agents.verify.words import verdict_tokens

TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Unit:
    """A question after examples of others, and what every system does with it.

    Attributes
    ----------
    question : str
        The user's turn: examples, then the question.
    prompt : tuple of int
        Its tokens as the model reads them, P in all.
    examples : int
        Examples before the question; the first may have lost its beginning.
    branches, tokens : int
        Branches that are sampled (B), and tokens of each (T), whatever they are.
    verification : tuple of int
        The tokens that follow a branch and ask whether it is right (V).
    verdicts : tuple of tuple of int
        The tokens that begin YES, and those that begin NO.
    sampling : Sampling
        How tokens are drawn.
    """

    question: str
    prompt: tuple[int, ...]
    examples: int
    branches: int
    tokens: int
    verification: tuple[int, ...]
    verdicts: Groups
    sampling: Sampling

    def seeded(self, seed: int) -> Sampling:
        """The sampling of one run."""
        return self.sampling.replace(seed=seed)

    @property
    def length(self) -> int:
        """Tokens of a sequence at its longest: prompt, branch and verification."""
        return len(self.prompt) + self.tokens + len(self.verification)

    def described(self) -> dict[str, Any]:
        """The unit as JSON values."""
        return {
            "prefix": len(self.prompt),
            "examples": self.examples,
            "branches": self.branches,
            "tokens": self.tokens,
            "verification_tokens": len(self.verification),
            "temperature": self.sampling.temperature,
        }


def make_unit(
    codec: TextCodec,
    questions: Sequence[Question],
    *,
    prefix: int = 1024,
    branches: int = 8,
    tokens: int = 64,
    context: int | None = None,
) -> Unit:
    """Make a unit whose prompt has exactly `prefix` tokens.

    The first question that fits is asked, after examples of others (:func:`~rksc_agents.bench.prompts.few_shot`).

    Parameters
    ----------
    codec : TextCodec
        The model's text.
    questions : sequence of Question
        At least the one that is asked; examples need an answer.
    prefix, branches, tokens : int, default 1024, 8, 64
        P, B and T.
    context : int or None
        The model's context in tokens, where it is to be checked.

    Raises
    ------
    ConfigError
        If a number is below 1, the questions cannot make such a prompt, or the model's context is too short.
    """
    if min(prefix, branches, tokens) < 1:
        raise ConfigError(f"prefix = {prefix}, branches = {branches}, tokens = {tokens}: all must be at least 1")
    text, prompt, examples = few_shot(codec, questions, prefix)
    unit = Unit(
        question=text,
        prompt=prompt,
        examples=examples,
        branches=branches,
        tokens=tokens,
        verification=codec.follow_up(text, SelfVerifier().request, ()),
        verdicts=verdict_tokens(codec),
        sampling=Sampling(temperature=TEMPERATURE, max_tokens=tokens, ignore_eos=True),
    )
    if context is not None and unit.length > context:
        raise ConfigError(
            f"prefix = {prefix} and tokens = {tokens} make sequences of {unit.length} tokens with the verification, "
            f"and the model's context has {context}: lower one of them"
        )
    return unit


def make_units(
    codec: TextCodec,
    questions: Sequence[Question],
    count: int,
    *,
    prefix: int = 1024,
    tokens: int = 64,
    context: int | None = None,
) -> list[Unit]:
    """Make units of different prompts, with examples that begin elsewhere in the questions, so that they share little.

    Parameters
    ----------
    codec, questions, prefix, tokens, context
        As for :func:`make_unit`.
    count : int
        Units.

    Raises
    ------
    ConfigError
        As there, and if there are not enough questions.
    """
    found: dict[tuple[int, ...], Unit] = {}
    for at in range(len(questions)):
        if len(found) == count:
            break
        unit = make_unit(codec, [*questions[at:], *questions[:at]], prefix=prefix, tokens=tokens, context=context)
        found.setdefault(unit.prompt, unit)
    if len(found) < count:
        raise ConfigError(
            f"{len(questions)} questions make {len(found)} different prompts of {prefix} tokens, and {count} are "
            "asked for: give more questions"
        )
    return list(found.values())
