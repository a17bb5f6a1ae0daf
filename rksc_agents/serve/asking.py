"""From a client's request to the reasoner's options: which strategy, how many branches, within which limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rksc_agents.adapter.call import options_of
from rksc_agents.errors import ConfigError
from rksc_agents.reasoning import STRATEGIES, BestOfN, Direct, Strategy
from rksc_agents.request import Options
from rksc_agents.serve.limits import Limits
from rksc_agents.serve.requests import ChatRequest, CompletionRequest
from rksc_agents.types import Prompt, Rendered

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "stop")
_BRANCHES = {
    "self-consistency": "branches",
    "best-of-n": "branches",
    "beam-search": "beams",
    "tree-of-thought": "proposals",
}
_SERVER_SIDE = ("verifier", "extract", "confidence")  # what would name code or models of the server's


class UnknownModelError(ConfigError):
    """A model's name that this server does not have."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the reasoner takes it.

    Attributes
    ----------
    prompt : str or messages
        What is asked.
    options : dict
        The reasoner's options.
    strategy : Strategy
        How it is reasoned.
    n : int
        Choices that were asked for.
    """

    prompt: Prompt
    options: Options
    strategy: Strategy
    n: int

    @property
    def direct(self) -> bool:
        """Whether the first branch is the answer, so that it can be streamed."""
        return isinstance(self.strategy, Direct)


def asked_of(body: ChatRequest | CompletionRequest, served: str, default: Strategy, limits: Limits) -> Asked:
    """What a request asks for.

    Raises
    ------
    UnknownModelError
        If the model is another one.
    ConfigError
        If a field is malformed, or beyond a limit.
    """
    strategy = _strategy(body, served, default)
    n = body.n or 1
    if n > 1 and isinstance(strategy, Direct):
        strategy = BestOfN(branches=n)
    limits.check_branches(branches_of(strategy))
    if n > branches_of(strategy):
        raise ConfigError(f"n = {n} with {strategy.name} of {branches_of(strategy)} branches: ask for more branches")
    settings: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING if getattr(body, name) is not None}
    wanted = body.max_tokens if isinstance(body, CompletionRequest) else body.max_completion_tokens or body.max_tokens
    settings["max_tokens"] = limits.check_tokens(wanted)
    prompt: Prompt
    if isinstance(body, ChatRequest):
        prompt = _messages(body.messages)
        for name in ("tools", "tool_choice", "parallel_tool_calls", "response_format"):
            if getattr(body, name) is not None:
                settings[name] = getattr(body, name)
        _check_tools(body.tools or ())
    else:
        prompt = Rendered(body.prompt)
    return Asked(prompt, {**options_of(settings), "strategy": strategy}, strategy, n)


def branches_of(strategy: Strategy) -> int:
    """Branches that a strategy has at most at one time."""
    return int(getattr(strategy, _BRANCHES.get(strategy.name, ""), 1))


def _strategy(body: ChatRequest | CompletionRequest, served: str, default: Strategy) -> Strategy:
    name, at, choice = body.model.partition("@")
    if name != served:
        raise UnknownModelError(f"model = {body.model!r}: this server has {served!r}, and {served}@STRATEGY:BRANCHES")
    if body.reasoning is not None:
        settings = body.reasoning.model_dump()
        return _made(settings.pop("strategy"), settings)
    if not at:
        return default
    kind, colon, count = choice.partition(":")
    if colon and not (count.isascii() and count.isdecimal()):
        raise UnknownModelError(f"model = {body.model!r}: {count!r} is no number of branches")
    field = _BRANCHES.get(kind)
    if colon and field is None:
        raise UnknownModelError(f"model = {body.model!r}: {kind} has no number of branches")
    return _made(kind, {field: int(count)} if colon and field else {})


def _made(name: str, settings: Mapping[str, Any]) -> Strategy:
    if name not in STRATEGIES:
        raise ConfigError(f"strategy = {name!r}: give one of {', '.join(sorted(STRATEGIES))}")
    if forbidden := [field for field in settings if field in _SERVER_SIDE]:
        raise ConfigError(f"reasoning.{forbidden[0]} cannot be chosen by a client: leave it out")
    return STRATEGIES[name](**settings)


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages as the core takes them: "developer" is "system", and what is empty is left out."""
    taken = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        if kept.get("role") == "developer":
            kept["role"] = "system"
        taken.append(kept)
    return taken


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    for at, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str()}}:
                continue
        raise ConfigError(f'tools[{at}] is no tool: write {{"type": "function", "function": {{"name": ...}}}}')
