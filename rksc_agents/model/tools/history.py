"""Tool calls and results of earlier turns, in the shapes that chat templates take."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rksc_agents.errors import ConfigError
from rksc_agents.model.tools.formats import ToolFormat
from rksc_agents.model.tools.hermes import responded
from rksc_agents.types import ToolCall

Message = dict[str, Any]

_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


def normalized(messages: Sequence[Message], form: ToolFormat) -> list[Message]:
    """Messages whose calls are in OpenAI's form, their arguments as objects, which templates write as JSON themselves.

    Mistral's templates demand ids of nine letters and digits: others are replaced, the same by the same, and missing
    ones made up; a result without an id belongs to the first call before it that has no result yet.

    Raises
    ------
    ConfigError
        If a call has no name.
    """
    short = form.name.startswith("mistral")
    changed: list[Message] = []
    waiting: list[str] = []  # ids of calls without a result
    for number, message in enumerate(map(dict, messages)):
        if calls := message.get("tool_calls"):
            where = f"message {number}"
            message["tool_calls"] = [_call(where, at, call, short) for at, call in enumerate(_listed(where, calls))]
            waiting = [call["id"] for call in message["tool_calls"] if "id" in call]
        if message["role"] == "tool":
            id_ = message.get("tool_call_id")
            if short:
                id_ = _short_id(str(id_)) if id_ is not None else next(iter(waiting), _short_id(f"result {number}"))
                message["tool_call_id"] = id_
            waiting = [other for other in waiting if other != id_]
        changed.append(message)
    return changed


def _listed(where: str, calls: Any) -> Sequence[Any]:
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise ConfigError(f"{where} has the tool_calls {calls!r}: give a list of calls")
    return calls


def _call(where: str, at: int, call: Any, short: bool) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{where} has the tool call {call!r}: write it as {{'type': 'function', 'function': {{'name': ..., "
            "'arguments': {...}}}"
        )
    id_ = call.get("id")
    if short:
        id_ = _short_id(f"{where}, call {at}" if id_ is None else str(id_))
    written = {"type": "function", "function": {"name": function["name"], "arguments": _arguments(function)}}
    return written if id_ is None else {"id": id_, **written}


def _arguments(function: Mapping[str, Any]) -> Any:
    """The arguments as an object; what is no JSON object stays as it is."""
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except ValueError:
            return arguments
        return read if isinstance(read, dict) else arguments
    return arguments


def _short_id(id_: str) -> str:
    return id_ if _MISTRAL_ID.fullmatch(id_) else hashlib.sha256(id_.encode()).hexdigest()[:9]


def one_call_each(messages: list[Message]) -> list[Message]:
    """Calls that were made at once, one after the other, each followed by its result."""
    changed: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            changed.append(message)
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for number, (call, result) in enumerate(zip(calls, _matched(calls, results), strict=True)):
            changed.append({**message, "content": "" if number else message["content"], "tool_calls": [call]})
            changed += [result] if result is not None else []
        changed += results  # those that belong to no call
    return changed


def _matched(calls: Sequence[Mapping[str, Any]], results: list[Message]) -> list[Message | None]:
    """The result of each call, taken out of `results`: by its id, else the next one without any call's id."""
    ids = {call["id"] for call in calls if "id" in call}
    matched: list[Message | None] = []
    for call in calls:
        own = next((r for r in results if "id" in call and r.get("tool_call_id") == call["id"]), None)
        if own is None:
            own = next((r for r in results if r.get("tool_call_id") not in ids), None)
        if own is not None:
            results.remove(own)
        matched.append(own)
    return matched


def _spelled(message: Message, form: ToolFormat) -> str:
    """The calls of an assistant's message as text."""
    functions = [call["function"] for call in message["tool_calls"]]
    if all(isinstance(function["arguments"], dict) for function in functions):
        return form.spell([ToolCall(name=f["name"], arguments=f["arguments"]) for f in functions])
    return "\n".join(json.dumps(function, ensure_ascii=False, default=str) for function in functions)


def as_text(message: Message, form: ToolFormat) -> Message:
    """A call as the assistant's text, a result as a user's turn."""
    if message["role"] == "tool":
        return {"role": "user", "content": responded(message["content"])}
    if not message.get("tool_calls"):
        return message
    text = "\n".join(filter(None, (message["content"], _spelled(message, form))))
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def told(messages: Sequence[Message], instructions: str) -> list[Message]:
    """The conversation with instructions at the end of its system text."""
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": instructions}, *messages]
    first = {**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"}
    return [first, *messages[1:]]
