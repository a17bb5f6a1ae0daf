"""One call's settings: the model object's own, and what differs for this call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast

from langchain_rksc.tools import openai_tools, schema_of
from rksc_agents.adapter import call
from rksc_agents.adapter.fields import check_names
from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents import Options, RKSCReasoner, Strategy

SETTINGS = (*call.SETTINGS, "n", "logprobs", "stream_reasoning")
"""What a model object and a call may set."""

ANSWERS = (*call.FORM, "strict")
"""What a call alone may set: what the answer is to look like."""

ALIASES = {"stop_sequences": "stop", "model_name": "model"}
"""Other names of settings."""

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
    def of(
        cls,
        own: Mapping[str, Any],
        model: str,
        stop: list[str] | None,
        given: Mapping[str, Any],
        owner: str = "ChatRKSC",
    ) -> Self:
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
        owner : str, default "ChatRKSC"
            The model object's class, for messages.

        Raises
        ------
        ConfigError
            If an argument is unknown, or names another model.
        """
        named = {ALIASES.get(name, name): value for name, value in given.items()}
        known = (*SETTINGS, *ANSWERS, "model")
        check_names(owner, named.keys() - set(_INTERNAL), known, "a call of ")
        if named.get("model") not in (None, model):
            raise ConfigError(
                f"model = {named['model']!r} for one call: this object serves {model!r}, so make another "
                f"{owner}(model={named['model']!r})"
            )
        merged = {name: own[name] for name in SETTINGS if own.get(name) is not None}
        merged |= {name: value for name, value in named.items() if value is not None}
        merged |= {} if stop is None else {"stop": stop}
        n = merged.get("n", 1)
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 1024:
            raise ConfigError(f"n = {n!r}: give a number of answers from 1 to 1024")
        return cls(
            options=_options(merged),
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


def _options(merged: Mapping[str, Any]) -> Options:
    strict = merged.get("strict")
    tools = openai_tools(merged.get("tools", []), strict)
    return call.options_of({**merged, "tools": tools}, partial(schema_of, strict=strict))
