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
from rksc_agents.model.text import TextCodec
from rksc_agents.reasoning import STRATEGIES, Strategy
from rksc_agents.reasoning.problem import Settings
from rksc_agents.types import Prompt, SharingMode
from rksc_agents.verify.certificate import Certificate, Value, stored_path
from rksc_agents.verify.gates import PRESETS, ExitConfig
from rksc_agents.verify.verifier import Verifier

Exit = ExitConfig | Certificate | Path | str
"""Early exit: thresholds, a certificate or its path, a preset's name, or "auto"."""


class CertificateWarning(UserWarning):
    """A certificate is used for something else than it was made for, so its promise does not hold."""


class Options(TypedDict, total=False):
    """What a call may set; see :meth:`rksc_agents.reasoner.RKSCReasoner.reason`."""

    strategy: Strategy | str | None
    phrasings: Sequence[Prompt]
    sharing: Sharing | SharingMode | None
    exit: Exit | None
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
    _certificates: dict[Path, Certificate] = field(default_factory=dict)

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
            raise ConfigError("phrasings = {phrasings!r}: give a list of other ways to put the question")
        shared = given.pop("sharing", None)
        exit_ = given.pop("exit", None)
        sampling = self.sampling.replace(**given) if given else self.sampling
        prompts = tuple(self.codec.encode(prompt) for prompt in strategy.prompts(question, phrasings))
        longest = max(map(len, prompts))
        if longest >= self.context:
            raise PromptTooLongError(longest, self.context)
        settings = Settings(
            sampling=sampling,
            measure=strategy.measure,
            extractor=strategy.extractor,
            verifier=strategy.checker,
            exits=self.exits(self.exit if exit_ is None else exit_, strategy, sampling),
            sharing=self.sharing if shared is None else sharing_of(shared),
        )
        return Request(question, prompts, strategy, settings, self.codec.opens_thinking(prompts[0]))

    def exits(self, exit_: Exit, strategy: Strategy, sampling: Sampling) -> ExitConfig:
        """The thresholds that `exit_` names; warns where a certificate was made for something else."""
        if exit_ == "auto":
            stored = self._stored(stored_path(self.model_hash, self.prompt_hash(strategy.checker)))
            if stored is None or stored.measure != strategy.measure.name:
                return ExitConfig.preset("strict")
            exit_ = stored
        if isinstance(exit_, str) and exit_ in PRESETS:
            return ExitConfig.preset(exit_)
        if isinstance(exit_, (str, Path)):
            exit_ = self._loaded(Path(exit_))
        exits = exit_ if isinstance(exit_, ExitConfig) else ExitConfig.from_certificate(exit_)
        if exits.certificate is not None:
            differing = exits.certificate.differences(
                model_hash=self.model_hash,
                prompt_hash=self.prompt_hash(strategy.checker),
                measure=strategy.measure.name,
                settings=settings_of(strategy, sampling),
                verifier=strategy.checker.name,
            )
            if differing:
                warnings.warn(
                    "the certificate was made for something else, so its promise does not hold here ("
                    + "; ".join(differing)
                    + "): calibrate anew with `rksc calibrate`, or set exit='strict'",
                    CertificateWarning,
                    stacklevel=6,
                )
        return exits

    def _stored(self, path: Path) -> Certificate | None:
        return self._loaded(path) if path in self._certificates or path.exists() else None

    def _loaded(self, path: Path) -> Certificate:
        if path not in self._certificates:
            if not path.exists() and path.suffix != ".json":
                names = ", ".join(PRESETS)
                raise ConfigError(f"exit = {str(path)!r}: give one of {names}, 'auto', or a certificate's path")
            self._certificates[path] = Certificate.load(path)
        return self._certificates[path]

    def prompt_hash(self, verifier: Verifier) -> str:
        """What identifies the prompts of question and verifier."""
        asked = str(getattr(verifier, "prompt", verifier.name))
        text = f"{verifier.name}\n{asked}\n{self.codec.template}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def settings_of(strategy: Strategy, sampling: Sampling) -> dict[str, Value]:
    """The settings that a certificate's promise depends on."""
    return {
        "strategy": strategy.name,
        "branches": getattr(strategy, "branches", None),
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
    }


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
