"""One call's settings: the model object's own, and what differs for this call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, cast

from langchain_rksc.settings import exit_of, sharing_of, strategy_of
from langchain_rksc.tools import FREE, choice_of, grammar_of, openai_tools
from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents import Options, RKSCReasoner, Strategy

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "stop", "seed")
"""The fields of :class:`~rksc_agents.config.Sampling` that a model object and a call may set."""

SETTINGS = (*SAMPLING, "strategy", "sharing", "exit", "n", "logprobs", "stream_reasoning")
"""What a model object and a call may set."""

ANSWERS = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "grammar", "strict")
"""What a call alone may set: what the answer is to look like."""

ALIASES = {"stop_sequences": "stop", "model_name": "model"}
"""Other names of settings."""

MADE: Mapping[str, Callable[[object], Any]] = {"strategy": strategy_of, "sharing": sharing_of, "exit": exit_of}
"""What makes objects of the core of settings."""

_INTERNAL = ("stream", "stream_usage", "ls_structured_output_format", "structured_output_format")


@dataclass(frozen=True)
class Call:
    """What one call is to do.

    Attributes
    ----------
    options : dict
        For the reasoner: what differs from its own settings.
    n : int
        How many answers to give.
    logprobs : bool
        Whether the message tells the log-probabilities of its tokens.
    stream_reasoning : bool
        Whether the branches' texts are streamed, as reasoning.
    stream_usage : bool
        Whether a stream tells the usage.
    """

    options: Options = field(default_factory=lambda: cast("Options", {}))
    n: int = 1
    logprobs: bool = False
    stream_reasoning: bool = False
    stream_usage: bool = True

    @classmethod
    def of(cls, own: Mapping[str, Any], model: str, stop: list[str] | None, given: Mapping[str, Any]) -> Self:
        """Check a call's arguments and lay them over the model object's own settings.

        Parameters
        ----------
        own : mapping
            Settings of the model object, by the names of :data:`SETTINGS`; None is the reasoner's own.
        model : str
            Its model's name.
        stop : list of str or None
            The call's stop texts; None is the object's own.
        given : mapping
            The call's other arguments.

        Raises
        ------
        ConfigError
            If an argument is unknown, or names another model.
        """
        named = {ALIASES.get(name, name): value for name, value in given.items()}
        unknown = sorted(named.keys() - {*SETTINGS, *ANSWERS, *_INTERNAL, "model"})
        if unknown:
            known = ", ".join((*SETTINGS, *ANSWERS, "model"))
            raise ConfigError(f"a call of ChatRKSC has no argument {', '.join(map(repr, unknown))}; it takes {known}")
        if named.get("model") not in (None, model):
            raise ConfigError(
                f"model = {named['model']!r} for one call: this object serves {model!r}, so make another "
                f"ChatRKSC(model={named['model']!r})"
            )
        merged = {name: own[name] for name in SETTINGS if own.get(name) is not None}
        merged |= {name: value for name, value in named.items() if value is not None}
        merged |= {} if stop is None else {"stop": stop}
        n = merged.get("n", 1)
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1024:
            raise ConfigError(f"n = {n!r}: give a number of answers from 1 to 1024")
        return cls(
            options=cast("Options", _options(merged)),
            n=n,
            logprobs=bool(merged.get("logprobs", False)),
            stream_reasoning=bool(merged.get("stream_reasoning", False)),
            stream_usage=bool(merged.get("stream_usage", True)),
        )

    def strategy(self, reasoner: RKSCReasoner) -> Strategy:
        """The strategy that answers."""
        from rksc_agents.request import strategy_of as named_strategy

        given = self.options.get("strategy")
        return reasoner.strategy if given is None else named_strategy(given)


def _options(merged: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: merged[name] for name in SAMPLING if name in merged}
    options |= {name: made(merged[name]) for name, made in MADE.items() if name in merged}
    strict = merged.get("strict")
    tools = openai_tools(merged.get("tools", []), strict)
    choice = choice_of(merged.get("tool_choice"), tools)
    if choice is not None and (tools or choice not in FREE):
        options["tool_choice"] = choice
    if tools:
        options["tools"] = tools
        # a small model that must call says the same call again and again until its tokens are used up
        options["parallel_tool_calls"] = bool(merged.get("parallel_tool_calls", choice in (None, *FREE)))
    grammar, format_ = merged.get("grammar"), merged.get("response_format")
    if grammar is not None and format_ is not None:
        raise ConfigError("grammar and response_format both say what the answer looks like: give one of the two")
    if format_ is not None:
        grammar = grammar_of(format_, strict)
    if grammar is not None:
        options["grammar"] = grammar
    return options
