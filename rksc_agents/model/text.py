"""Text to tokens and back: one codec per tokenizer, safe for many threads."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import cast

from transformers import PreTrainedTokenizerBase

from rksc_agents.errors import ConfigError
from rksc_agents.model.chat import Template, continues, conversation, plain
from rksc_agents.model.constraint import Grammars
from rksc_agents.model.controls import THINKING, Controls, is_control, unused_characters
from rksc_agents.model.detokenize import TextStream
from rksc_agents.model.shapes import Message
from rksc_agents.model.thinking import (
    CLOSE_TOKENS,
    HARMONY_TOKENS,
    OPEN_TOKENS,
    closing_marker,
    ends_inside,
    split_thinking,
)
from rksc_agents.model.tools import Tool, ToolFormat
from rksc_agents.model.tools.hermes import instructions
from rksc_agents.model.tools.history import normalized, told
from rksc_agents.model.tools.mistral import ARGS, Mistral, MistralArgs
from rksc_agents.types import Prompt, Rendered

__all__ = ["TextCodec", "TextStream", "split_thinking"]

# fmt: off
_END_OF_TURN = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>",
    "<|call|>", "<|end_of_text|>", "<|end_of_turn|>", "<|endofturn|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>",
})
# fmt: on
_TAIL = 32  # tokens at a prompt's end that can hold an opening marker written as text


class TextCodec:
    """What a tokenizer does, with one lock around it.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Left as it is found.
    eos_token_ids : iterable of int, default ()
        More tokens that end an answer, such as those of the generation config.

    Attributes
    ----------
    eos_token_ids : frozenset of int
        The tokenizer's, those given, and the end-of-turn tokens among the special tokens.

    Notes
    -----
    White space clean-up (``clean_up_tokenization_spaces``) is off: it changes what the model wrote and
    cannot be streamed. Thinking markers stay in decoded text also where they are special tokens, so that
    :func:`split_thinking` finds them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, eos_token_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.RLock()  # fast tokenizers are not thread-safe
        try:
            added = {token.content: (number, token) for number, token in tokenizer.added_tokens_decoder.items()}
        except NotImplementedError:  # mistral-common's tokenizer has none
            added = {}
        self.added = {content: number for content, (number, _) in added.items()}
        harmony = HARMONY_TOKENS if {"<|channel|>", "<|message|>"} <= added.keys() else frozenset()
        shown = {self.added[content] for content in (THINKING | harmony) & added.keys()}
        special = {content: number for content, (number, token) in added.items() if token.special}
        special |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._special = special
        self._skipped = frozenset(special.values()) - shown
        ends = {number for content, number in special.items() if content in _END_OF_TURN - harmony}
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_token_ids: frozenset[int] = frozenset(chain(own, eos_token_ids, ends))
        self._template = Template(tokenizer)
        self.grammars = Grammars(tokenizer, self.eos_token_ids)
        self._warned = False
        self._controls: tuple[object, Controls] | None = None
        self._normalized = [content for content, (_, token) in added.items() if token.normalized]

    @property
    def _writes_itself(self) -> bool:
        own = getattr(type(self._tokenizer), "apply_chat_template", None)
        return own is not PreTrainedTokenizerBase.apply_chat_template

    @property
    def is_chat(self) -> bool:
        """Whether the tokenizer writes conversations in a form that the model was trained on."""
        return self._tokenizer.chat_template is not None or self._writes_itself

    @property
    def template(self) -> str:
        """The chat template, as text; empty where there is none."""
        return str(self._tokenizer.chat_template or "")

    @cached_property
    def number_tokens(self) -> frozenset[int]:
        """The tokens whose text holds a digit: what they stand for must never come from another place."""
        with self._lock:
            vocabulary = self._tokenizer.get_vocab()
        return frozenset(number for text, number in vocabulary.items() if any(map(str.isnumeric, text)))

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls."""
        if self._tokenizer.chat_template is None and self._writes_itself:
            return MistralArgs() if ARGS in self._special else Mistral()
        return self._template.format

    @property
    def tool_tokens(self) -> frozenset[int]:
        """The special tokens whose text tool calls are read by."""
        known = self.added | self._special
        return frozenset(known[text] for text in self.tool_format.tokens if text in known)

    def encode(self, prompt: Prompt, tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Return the token ids of a prompt, ready for the model's turn.

        A text is one user turn. A last message of the assistant is continued, unless it calls tools. Control tokens
        in messages and tools become ordinary text; thinking markers in the assistant's own messages stay markers.
        A :class:`~rksc_agents.types.Rendered` text is encoded as it is, with the token that begins a text before it.
        Without a chat template a text is encoded as it is, as base models continue text, and a conversation as
        lines ``User: ...`` and ``Assistant: ...``; a warning says so once.

        Parameters
        ----------
        prompt : str or sequence of messages
            The question or the conversation.
        tools : sequence of Tool, default ()
            What the model may call. The chat template offers them, or a system text does where the template teaches no
            way of calling that is known here, or leaves them out (a warning says that once).

        Raises
        ------
        ConfigError
            The prompt is empty or malformed, or the chat template rejects it in every shape.
        """
        if isinstance(prompt, Rendered):
            return self._encode_rendered(prompt, tools)
        messages = normalized(conversation(prompt), self.tool_format)
        with self._lock:
            if self._tokenizer.chat_template is not None:
                return self._encode_chat(messages, tools)
            if self._writes_itself:
                return self._encode_by_tokenizer(messages, tools)
            self._warn_once(
                "the tokenizer has no chat template: a text is continued as it is, a conversation is written as lines "
                "'User: ...' and 'Assistant: ...'; set tokenizer.chat_template for a chat model"
            )
            controls = self._control_tokens()
            marks = unused_characters([messages, [tool.function() for tool in tools]])
            marked = [controls.mark(message, marks) for message in messages]
            if tools:
                marked = told(marked, instructions(controls.mark_tools(tools, marks)))
            conversed = len(marked) > 1 or not isinstance(prompt, str)
            text = plain(marked, self.tool_format) if conversed else marked[0]["content"]
            return self._bos() + controls.encode(text, marks)

    def follow_up(self, prompt: Prompt, request: str, after: Sequence[int]) -> tuple[int, ...]:
        """Return the token ids that end the assistant's turn, say `request` as the user and open the next turn.

        They are made from a rendered conversation in which a mark stands for what the assistant wrote, so they fit
        whatever it wrote, also where a template would strip its thinking. The new turn opens without thinking.

        Parameters
        ----------
        prompt : str or sequence of messages
            What the assistant answered, or the conversation with the message that it continued.
        request : str
            What the user says next.
        after : sequence of int
            The sequence that the ids are to follow; the token that ended the assistant's turn is not repeated.
        """
        messages = normalized(conversation(prompt), self.tool_format)
        if continues(messages):
            messages = messages[:-1]
        if self._tokenizer.chat_template is None and self._writes_itself:
            raise ConfigError(
                f"{type(self._tokenizer).__name__} writes conversations itself, so nothing can be asked behind what "
                "the model wrote: verify by a separate prompt (JudgeVerifier)"
            )
        marks = unused_characters([*messages, request])
        written = f"{marks[0]}answer{marks[0]}"
        asked: list[Message] = [{"role": "assistant", "content": written}, {"role": "user", "content": request}]
        with self._lock:
            controls = self._control_tokens()
            marked = [controls.mark(message, marks) for message in messages]
            marked += [asked[0], controls.mark(asked[1], marks)]
            if self._tokenizer.chat_template is not None:
                text = self._template.render(marked, thinking=False)
            else:
                text = plain(marked, self.tool_format)
            _, found, rest = text.rpartition(written)
            if not found:
                raise ConfigError(
                    "the chat template leaves out what the assistant wrote, so nothing can be asked about it: set "
                    "another tokenizer.chat_template, or verify by a separate prompt (JudgeVerifier)"
                )
            tokens = controls.encode(rest + closing_marker(rest), marks)
        if after and after[-1] in self.eos_token_ids and after[-1] in tokens:
            end = tokens.index(after[-1])
            if not self._decode(list(tokens[:end])).strip():  # some templates write a space before it
                return tokens[end + 1 :]
        return tokens

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of plain text: no special token is added, none is read from the text."""
        with self._lock:
            controls = self._control_tokens()
            marks = unused_characters(text)
            return controls.encode(controls.mark_text(text, marks), marks)

    def decode(
        self, tokens: Sequence[int], skip_special_tokens: bool = True, *, shown: frozenset[int] = frozenset()
    ) -> str:
        """Return the text of `tokens`, without special tokens unless told otherwise.

        Thinking markers, and the special tokens in `shown`, stay.
        """
        if skip_special_tokens:
            skipped = self._skipped - shown
            return self._decode([token for token in tokens if token not in skipped])
        return self._decode(list(tokens))

    def stream(self, stop: Sequence[str] = (), *, shown: frozenset[int] = frozenset()) -> TextStream:
        """Return a new stream that turns one branch's tokens into text, up to one of the texts `stop`.

        A stop text that is a special token ends the text at that token.
        """
        if isinstance(stop, str) or "" in stop:
            raise ConfigError(f"stop = {stop!r}: give a sequence of texts, none of them empty")
        special = {self._special[text.strip()] for text in stop if text.strip() in self._special}
        return TextStream(self._decode, skipped=self._skipped - shown, stop=tuple(stop), stop_tokens=special)

    def opens_thinking(self, tokens: Sequence[int]) -> bool:
        """Say whether a rendered prompt ends inside a thinking block, so that the answer starts in it."""
        openings = {self.added[text] for text in OPEN_TOKENS & self.added.keys()}
        closings = {self.added[text] for text in CLOSE_TOKENS & self.added.keys()}
        for token in reversed(tokens):
            if token in openings:
                return True
            if token in closings:
                return False
            if token in self._skipped:
                break
        # A marker that the vocabulary defines is a marker only as that token, otherwise it is user text.
        spelled = OPEN_TOKENS - self.added.keys()
        return ends_inside(self.decode(tokens[-_TAIL:], skip_special_tokens=False), spelled)

    def _decode(self, tokens: list[int]) -> str:
        with self._lock:
            text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def _encode_chat(self, messages: list[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        controls = self._control_tokens()
        marks = unused_characters([messages, [tool.function() for tool in tools]])
        marked = [controls.mark(message, marks) for message in messages]
        text = self._template.render(marked, tools=controls.mark_tools(tools, marks))
        for mark in marks:  # a template that writes JSON in ASCII escapes them
            text = text.replace(f"\\u{ord(mark):x}", mark)
        tokens = controls.encode(text, marks)
        bos = self._tokenizer.bos_token_id
        return tokens[1:] if bos is not None and tokens[:2] == (bos, bos) else tokens

    def _encode_rendered(self, prompt: Rendered, tools: Sequence[Tool]) -> tuple[int, ...]:
        conversation(prompt)  # refuses what is no text
        if tools:
            raise ConfigError("a rendered prompt has no place for tools: write them into it, or give messages")
        with self._lock:
            tokens = tuple(self._tokenizer.encode(str(prompt), add_special_tokens=False))
            bos = self._bos()
        return tokens if tokens[: len(bos)] == bos else bos + tokens

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, stacklevel=3)

    def _encode_by_tokenizer(self, messages: list[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """For tokenizers that write conversations themselves, token by token, as mistral-common's does."""
        more = continues(messages)
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages,
                tools=[tool.function() for tool in tools] or None,
                tokenize=True,
                return_dict=True,
                continue_final_message=more,
                add_generation_prompt=not more,
            )
        except Exception as error:  # its error types are its own
            raise ConfigError(f"the tokenizer rejects the conversation: {error}") from error
        return tuple(cast(Mapping[str, list[int]], encoded)["input_ids"])

    def _bos(self) -> tuple[int, ...]:
        bos = self._tokenizer.bos_token_id
        adds = bos is not None and list(self._tokenizer.encode("a"))[:1] == [bos]
        return (bos,) if adds else ()

    def _control_tokens(self) -> Controls:
        """The tokens that text must not spell, for the chat template as it is now."""
        template = self._tokenizer.chat_template
        if self._controls is None or self._controls[0] != template:
            written = template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)
            listed = getattr(self._tokenizer, "chat_control_tokens", None) or ()
            tokens = {
                text: number
                for text, number in (self.added | self._special).items()
                if text in self._special or text in listed or THINKING & {text} or is_control(text, written)
            }
            self._controls = (template, Controls(self._tokenizer, tokens, self._normalized))
        return self._controls[1]
