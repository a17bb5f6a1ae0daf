"""Results in OpenAI's form: whole, and piece by piece."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rksc_agents.adapter.results import calls_of, each_branch, finish_reason, logprobs_of, usage_of
from rksc_agents.result import ReasoningResult

Decode = Callable[[Sequence[int]], str]


def chosen(result: ReasoningResult, n: int) -> list[ReasoningResult]:
    """The `n` choices of a request: the winner first, then the other branches in their order."""
    if n == 1:
        return [result]
    each = each_branch(result, result.strategy)
    leaves = [at for at in range(len(each)) if at != result.winner]
    return [result, *(each[at] for at in leaves[: n - 1])]


class Replies:
    """The replies to one request.

    Parameters
    ----------
    id : str
        The reply's.
    model : str
        As the client called it.
    chat : bool
        Whether it is a chat completion.
    asked : object
        The conversation, for the ids of calls.
    decode : callable or None
        Where log-probabilities are wanted: gives the text of tokens.
    """

    def __init__(self, id: str, model: str, *, chat: bool, asked: object, decode: Decode | None) -> None:
        self.id = id
        self.model = model
        self.chat = chat
        self._asked = asked
        self._decode = decode
        self._made = int(time.time())

    def whole(self, result: ReasoningResult, n: int) -> dict[str, Any]:
        """The reply as one object; `rksc` is the evidence."""
        choices = [self._choice(each, at) for at, each in enumerate(chosen(result, n))]
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": choices,
            "usage": usage_of(result),
            "rksc": result.evidence(),
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._made, "model": self.model}

    def _choice(self, result: ReasoningResult, index: int) -> dict[str, Any]:
        said = {"message": self._message(result)} if self.chat else {"text": result.text}
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs(result),
            "finish_reason": finish_reason(result),
        }

    def _message(self, result: ReasoningResult) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": result.text, "refusal": None}
        if result.thinking:
            message["reasoning_content"] = result.thinking
        if calls := calls_of(result, self._asked):
            message |= {"tool_calls": calls, "content": result.text or None}
        return message

    def _logprobs(self, result: ReasoningResult) -> dict[str, Any] | None:
        if self._decode is None:
            return None
        content = logprobs_of(result, self._decode)
        if self.chat:
            return {"content": content, "refusal": None}
        return {
            "tokens": [each["token"] for each in content],
            "token_logprobs": [each["logprob"] for each in content],
            "top_logprobs": None,
            "text_offset": [sum(len(each["token"]) for each in content[:at]) for at in range(len(content))],
        }

    # -- pieces ---------------------------------------------------------------------------------

    def begun(self) -> dict[str, Any]:
        """The first piece: who speaks."""
        return self._piece(0, {"role": "assistant", "content": ""})

    def grew(self, text: str, thinking: str = "", index: int = 0) -> dict[str, Any]:
        """A piece of text."""
        delta = {"content": text} if text else {}
        if thinking:
            delta["reasoning_content"] = thinking
        return self._piece(index, delta)

    def ended(self, result: ReasoningResult, index: int = 0) -> dict[str, Any]:
        """The last piece of a choice: its calls, log-probabilities and why it ended."""
        delta: dict[str, Any] = {}
        if calls := calls_of(result, self._asked):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        piece = self._piece(index, delta, finish_reason(result))
        piece["choices"][0]["logprobs"] = self._logprobs(result)
        piece["rksc"] = result.evidence()
        return piece

    def used(self, result: ReasoningResult) -> dict[str, Any]:
        """What it took, after the last piece."""
        return {**self._head(self._chunk), "choices": [], "usage": usage_of(result)}

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _piece(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        said = {"delta": delta} if self.chat else {"text": delta.get("content", "")}
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        return {**self._head(self._chunk), "choices": [choice]}
