"""Keeping control tokens out of user text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import chain
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from rksc_agents.errors import ConfigError
from rksc_agents.model.shapes import Message
from rksc_agents.model.thinking import CLOSE_TOKENS, OPEN_TOKENS
from rksc_agents.model.tools.spec import Tool

THINKING = OPEN_TOKENS | CLOSE_TOKENS


def is_control(text: str, template: str) -> bool:
    """Whether an added token is for control in a chat template, and not a piece of text."""
    # Gemma's vocabulary has white space and HTML tags among its added tokens: those are text.
    return not text.isspace() and (text in template or (text.startswith("<|") and text.endswith("|>")))


def unused_characters(value: object) -> tuple[str, str]:
    """Two characters that occur nowhere in `value`: the noncharacters of Unicode first."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    free = (chr(code) for code in chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE)))
    unused = (mark for mark in free if mark not in text and f"\\u{ord(mark):x}" not in text)
    return next(unused), next(unused)


_Finder = tuple[re.Pattern[str], set[str]]  # finds control tokens in a text, and in its normalized form


class Controls:
    """Keeps control tokens out of user text.

    The tokens spelled in a text are put between two marks before the template is rendered, and what is
    between marks is encoded without the vocabulary's added tokens. transformers' `sanitize_control_tokens`
    does the same, but misses tokens that a template writes in pieces, tokens that only normalization brings
    about, and tokenizers that spell such a token from plain text; and it takes the thinking markers out of
    the assistant's own messages, so that a continued message or a second turn would differ from what the
    model wrote.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, int], normalized: list[str]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._normalizer = backend.normalizer if backend is not None else None
        self._all = self._finder(tokens.keys(), normalized)
        self._without_thinking = self._finder(tokens.keys() - THINKING, normalized)

    def _finder(self, texts: Set[str], normalized: Iterable[str]) -> _Finder:
        longest_first = sorted(filter(None, texts), key=lambda text: (-len(text), text))
        forms: set[str] = set()
        if self._normalizer is not None:  # such tokens are also found in text that only becomes them
            forms = {form for text in texts & set(normalized) for form in (text, self._normal(text)) if form}
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)"), forms

    def _normal(self, text: str) -> str:
        return text if self._normalizer is None else cast(str, self._normalizer.normalize_str(text))

    def mark(self, message: Message, marks: tuple[str, str]) -> Message:
        """Return `message` with the control tokens in all its texts marked."""
        finder = self._without_thinking if message["role"] == "assistant" else self._all
        marked = {key: value if key == "role" else self._mark(value, marks, finder) for key, value in message.items()}
        if "tool_calls" in message:
            marked["tool_calls"] = self.mark_values(message["tool_calls"], marks)
        return marked

    def mark_values(self, value: Any, marks: tuple[str, str]) -> Any:
        """Return a nested value, such as the tools, with the control tokens in all its texts and keys marked."""
        if isinstance(value, Mapping):
            return {
                key if key.isidentifier() else self.mark_text(key, marks): self.mark_values(item, marks)  # "type", ...
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.mark_values(item, marks) for item in value]
        return self._mark(value, marks, self._all)

    def mark_tools(self, tools: Sequence[Tool], marks: tuple[str, str]) -> list[Tool]:
        """Return tools with the control tokens in all their texts marked."""
        return [
            Tool(
                self.mark_text(tool.name, marks),
                self.mark_text(tool.description, marks),
                self.mark_values(tool.parameters, marks),
            )
            for tool in tools
        ]

    def mark_text(self, text: str, marks: tuple[str, str]) -> str:
        """Return `text` with its control tokens marked."""
        return cast(str, self._mark(text, marks, self._all))

    def _mark(self, value: Any, marks: tuple[str, str], finder: _Finder) -> Any:
        if isinstance(value, str):
            begin, end = marks
            pattern, forms = finder
            if forms:
                normal = self._normal(value)
                if any(form in normal for form in forms):
                    return begin + value + end
            return pattern.sub(lambda match: begin + match.group() + end, value)
        if isinstance(value, Mapping):
            return {key: self._mark(item, marks, finder) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark(item, marks, finder) for item in value]
        return value

    def encode(self, text: str, marks: tuple[str, str]) -> tuple[int, ...]:
        """Encode marked text: control tokens between marks as ordinary text, others as tokens."""
        begin, end = marks
        pieces = re.split(f"{begin}([^{begin}{end}]*){end}|[{begin}{end}]", text)  # text and marked text in turn
        tokens: list[int] = []
        for k, piece in enumerate(pieces):
            if not piece:
                continue
            encode = self._encode_literally if k % 2 else self._encode_plainly
            before = encode("\n") if tokens else []
            # After a newline, sentencepiece-like tokenizers do not put a space before the text.
            after = encode("\n" + piece) if tokens else []
            fits = bool(before) and after[: len(before)] == before
            tokens += after[len(before) :] if fits else encode(piece)
        return tuple(tokens)

    def _encode_plainly(self, text: str) -> list[int]:
        return cast(list[int], self._tokenizer.encode(text, add_special_tokens=False))

    def _encode_literally(self, text: str) -> list[int]:
        """Encode `text` with no added token recognized."""
        spelled = {number for content, number in self._tokens.items() if content in text}
        spelled.discard(cast(int, self._tokenizer.unk_token_id))
        tokens = self._without_added(text)
        if spelled.intersection(tokens):  # the vocabulary's own pieces give the control token: spell it out
            tokens = [token for character in text for token in self._without_added(character)]
        if spelled.intersection(tokens):
            raise ConfigError(f"the tokenizer can write {text!r} only as a control token: remove it from the prompt")
        return tokens

    def _without_added(self, text: str) -> list[int]:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return cast(list[int], self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        text = self._normal(text)
        words = (
            [text] if backend.pre_tokenizer is None else [w for w, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        )
        return [token.id for word in words for token in backend.model.tokenize(word)]
