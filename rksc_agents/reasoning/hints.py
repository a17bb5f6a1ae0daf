"""Hints: a line beside the question that sends a branch another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rksc_agents.errors import ConfigError
from rksc_agents.types import Prompt, Rendered

Place = Literal["before", "after"]
"""Where a hint goes: before the question, or after it, where the question's KV can be shared."""


def hinted(prompt: Prompt, hint: str, place: Place) -> Prompt:
    """Put a hint before or after a question, a blank line between them.

    Parameters
    ----------
    prompt : str or sequence of messages
        The question; of a conversation the last user message is changed, in a copy. A malformed one is returned as it
        is, for whoever reads it to refuse.
    hint : str
        The hint; empty for none.
    place : "before" or "after"
        Where it goes.

    Raises
    ------
    ConfigError
        If a conversation has no user message, or the prompt is rendered.
    """
    if isinstance(prompt, Rendered) and hint:
        raise ConfigError("a rendered prompt has no place for a hint: write it into the prompt, or drop the hints")
    if isinstance(prompt, str):
        return _joined(prompt, hint, place) if hint and prompt else prompt
    if not hint or isinstance(prompt, (Mapping, bytes)) or not isinstance(prompt, Sequence):
        return prompt
    messages = [message for message in prompt if isinstance(message, Mapping)]
    if len(messages) < len(prompt):
        return prompt
    last = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=None)
    if last is None:
        raise ConfigError("a hint goes beside a user message and the conversation has none: add one, or drop the hints")
    changed = {**messages[last], "content": _with_hint(messages[last].get("content"), hint, place)}
    return [*messages[:last], changed, *messages[last + 1 :]]


def _with_hint(content: Any, hint: str, place: Place) -> Any:
    if isinstance(content, str):
        return _joined(content, hint, place)
    if not isinstance(content, (list, tuple)):
        return content
    text = f"{hint}\n\n" if place == "before" else f"\n\n{hint}"
    part = {"type": "text", "text": text}
    return [part, *content] if place == "before" else [*content, part]


def _joined(text: str, hint: str, place: Place) -> str:
    return f"{hint}\n\n{text}" if place == "before" else f"{text}\n\n{hint}"
