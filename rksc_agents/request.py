"""A request before it runs: its options checked, its prompts rendered, its early exit settled."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from rksc_agents.config import Sampling, Sharing
from rksc_agents.errors import ConfigError, PromptTooLongError
from rksc_agents.form import Form
from rksc_agents.model.constraint import Constraint
from rksc_agents.model.grammar import Grammar
from rksc_agents.model.text import TextCodec
from rksc_agents.reasoning import STRATEGIES, Strategy
from rksc_agents.reasoning.judging import CertificateWarning
from rksc_agents.reasoning.problem import Settings
from rksc_agents.types import Prompt, SharingMode
from rksc_agents.verify.certificate import Certificate, Value, stored_path
from rksc_agents.verify.gates import PRESETS, ExitConfig
from rksc_agents.verify.verifier import Verifier

Exit = ExitConfig | Certificate | Path | str
"""Early exit: thresholds, a certificate or its path, a preset's name, or "auto"."""


_FORM = ("tools", "tool_choice", "parallel_tool_calls", "grammar")
_EXITS = f"give one of {', '.join(PRESETS)}, 'auto', a certificate or its path, or an ExitConfig"


class Options(TypedDict, total=False):
    """What a call may set; see :meth:`rksc_agents.reasoner.RKSCReasoner.reason`.

    Examples
    --------
    >>> options: Options = {"temperature": 0.5, "max_tokens": 64}
    >>> reasoner.reason("Q", **options).answer
    '4'
    """

    strategy: Strategy | str | None
    phrasings: Sequence[Prompt]
    sharing: Sharing | SharingMode | None
    like: Sequence[Prompt]
    exit: Exit | None
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    parallel_tool_calls: bool
    grammar: Grammar | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    max_tokens: int
    stop: str | Sequence[str]
    seed: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class Request:
    """What is left is to run."""

    question: Prompt
    prompts: tuple[tuple[int, ...], ...]
    strategy: Strategy
    settings: Settings
    thinking_opened: bool


@dataclass(eq=False)
class Desk:
    """Takes requests for one model.

    Attributes
    ----------
    codec : TextCodec
        The model's text.
    context : int
        The model's context in tokens.
    model_hash : str
        What identifies the model.
    strategy, sampling, sharing, exit
        What holds unless a call says otherwise.
    """

    codec: TextCodec
    context: int
    model_hash: str
    strategy: Strategy
    sampling: Sampling
    sharing: Sharing
    exit: Exit
    _read_before: dict[Path, tuple[int, ExitConfig]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.exit, Certificate):  # its lens is decoded once, not for each request
            self.exit = ExitConfig.from_certificate(self.exit)
        self.exits(self.exit, self.strategy, self.sampling)  # a bad name is told now, not with the first question

    def request(self, question: Prompt, options: Options) -> Request:
        """Check everything and render the prompts.

        Raises
        ------
        ConfigError
            If an option is unknown or outside its range.
        PromptTooLongError
            If a prompt does not fit the model's context.
        """
        given: dict[str, Any] = dict(options)
        named = given.pop("strategy", None)
        strategy = self.strategy if named is None else strategy_of(named)
        phrasings: Sequence[Prompt] = given.pop("phrasings", ())
        if isinstance(phrasings, (str, Mapping)) or not isinstance(phrasings, Sequence):
            raise ConfigError(f"phrasings = {phrasings!r}: give a list of other ways to put the question")
        exit_ = given.pop("exit", None)
        form = Form.of(**{name: given.pop(name) for name in _FORM if name in given})
        shared = given.pop("sharing", None)
        sharing = self.sharing if shared is None else sharing_of(shared)
        like = self._like(given.pop("like", ()), sharing, form)
        sampling = self.sampling.replace(**given) if given else self.sampling
        asked = strategy.prompts(question, phrasings)
        prompts = tuple(self.codec.encode(form.told(prompt), form.tools) for prompt in asked)
        longest = max(map(len, prompts))
        if longest >= self.context:
            raise PromptTooLongError(longest, self.context)
        exits, differing = self.exits(self.exit if exit_ is None else exit_, strategy, sampling)
        thinking_opened = self.codec.opens_thinking(prompts[0])
        constraint = form.constraint(self.codec, thinking_opened)
        if constraint is not None:
            _check_room(constraint, sampling.max_tokens)
        settings = Settings(
            sampling=sampling,
            measure=strategy.measure,
            reader=form.reader(self.codec, strategy.extractor),
            verifier=strategy.checker,
            exits=exits,
            differing=differing,
            sharing=sharing,
            like=like,
            constraint=constraint,
        )
        return Request(question, prompts, strategy, settings, thinking_opened)

    def _like(self, prompts: Sequence[Prompt], sharing: Sharing, form: Form) -> tuple[tuple[int, ...], ...]:
        if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Sequence):
            raise ConfigError(f"like = {prompts!r}: give a list of earlier prompts")
        if prompts and sharing.mode != "aligned":
            raise ConfigError(
                f"like = {len(prompts)} prompts with sharing {sharing.mode!r}, which takes nothing from other "
                "positions: set sharing='aligned', or drop them"
            )
        return tuple(self.codec.encode(form.told(prompt), form.tools) for prompt in prompts)

    def exits(self, exit_: Exit, strategy: Strategy, sampling: Sampling) -> tuple[ExitConfig, tuple[str, ...]]:
        """The thresholds that `exit_` names, and what differs from what their certificate was made for."""
        if exit_ == "auto":
            exits = self._stored(strategy)
        elif isinstance(exit_, str) and exit_ in PRESETS:
            exits = ExitConfig.preset(exit_)
        elif isinstance(exit_, ExitConfig):
            exits = exit_
        elif isinstance(exit_, Certificate):
            exits = ExitConfig.from_certificate(exit_)
        elif isinstance(exit_, (str, Path)):
            exits = self._read(Path(exit_))
        else:
            raise ConfigError(f"exit = {exit_!r}: {_EXITS}")
        if exits.certificate is None:
            return exits, ()
        differing = exits.certificate.differences(
            model_hash=self.model_hash,
            prompt_hash=self.prompt_hash(strategy.checker),
            measure=strategy.measure.name,
            settings=settings_of(strategy, sampling),
            verifier=strategy.checker.name,
        )
        return exits, tuple(differing)

    def _stored(self, strategy: Strategy) -> ExitConfig:
        """Those of the certificate in the user's cache folder, where there is one that can be read; else "strict"."""
        path = stored_path(self.model_hash, self.prompt_hash(strategy.checker))
        if path.exists():
            try:
                exits = self._read(path)
            except ConfigError as error:
                warnings.warn(f"early exit is 'strict', because {error}", CertificateWarning, stacklevel=6)
            else:
                if exits.measure == strategy.measure.name:
                    return exits
        return ExitConfig.preset("strict")

    def _read(self, path: Path) -> ExitConfig:
        if not path.exists() and path.suffix != ".json":
            raise ConfigError(f"exit = {str(path)!r}: {_EXITS}")
        written = path.stat().st_mtime_ns if path.exists() else 0
        if self._read_before.get(path, (None, None))[0] != written:
            self._read_before[path] = (written, ExitConfig.from_certificate(path))
        return self._read_before[path][1]

    def prompt_hash(self, verifier: Verifier) -> str:
        """What identifies the prompts of question and verifier."""
        asked = str(getattr(verifier, "prompt", verifier.name))
        text = f"{verifier.name}\n{asked}\n{self.codec.template}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def settings_of(strategy: Strategy, sampling: Sampling) -> dict[str, Value]:
    """The settings that a certificate's promise depends on: all but the seed, and what is compared by itself."""
    given = {name: getattr(strategy, name) for name in type(strategy).model_fields if name not in _BY_THEMSELVES}
    given |= {name: getattr(sampling, name) for name in type(sampling).model_fields if name != "seed"}
    return {"strategy": strategy.name, **{name: _plain(value) for name, value in given.items()}}


_BY_THEMSELVES = ("verifier", "confidence")


def _plain(value: object) -> Value:
    if value is None or isinstance(value, (str, int, float)):
        return value
    return getattr(value, "__qualname__", None) or str(value)


def _check_room(constraint: Constraint, max_tokens: int) -> None:
    least = constraint.closing()
    if least is not None and len(least) > max_tokens:
        raise ConfigError(
            f"max_tokens = {max_tokens} leaves no room for what the answer must hold: it takes {len(least)} tokens at "
            "least, so raise max_tokens, or ask for less"
        )


def strategy_of(strategy: Strategy | str) -> Strategy:
    """The strategy itself, or the one of that name with its defaults."""
    if isinstance(strategy, Strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise ConfigError(f"strategy = {strategy!r}: give one of {', '.join(sorted(STRATEGIES))}, or a Strategy")
    return STRATEGIES[strategy]()


def sharing_of(sharing: Sharing | str) -> Sharing:
    """The sharing itself, or that of a mode with its defaults."""
    return sharing if isinstance(sharing, Sharing) else Sharing(mode=sharing)
