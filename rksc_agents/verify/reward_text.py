"""How a reward model's input is written: a claim's question and text as the tokens that the model was trained on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rksc_agents.model.chat import continues, conversation, plain
from rksc_agents.model.text import TextCodec
from rksc_agents.model.tools.hermes import Generic
from rksc_agents.model.tools.history import normalized
from rksc_agents.types import Prompt
from rksc_agents.verify.verifier import Claim

Kind = Literal["sequence", "token"]
Per = Literal["answer", "step"]

_GAP = "\n\n"  # between question and answer where neither a template nor a separator token keeps them apart


@dataclass(frozen=True, slots=True)
class Row:
    """One input of the model: tokens, which text each belongs to (0 or 1), and where a token head is read."""

    tokens: tuple[int, ...]
    segments: tuple[int, ...]
    ends: tuple[int, ...]


class Writer:
    """Writes claims as the reward model reads them.

    Attributes
    ----------
    segmented : bool
        Whether the model is told which text each token belongs to.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, separator: str) -> None:
        self._codec = TextCodec(tokenizer)
        self._separator = separator
        self._mark = tokenizer.encode(separator, add_special_tokens=False)  # the user's: may be a control token
        self._chat = tokenizer.chat_template is not None
        self._closing: list[int] = []
        self._frame: list[list[int]] = [[], []]
        if self._chat:
            self._closing = tokenizer.encode(_closing(tokenizer), add_special_tokens=False)
        else:
            pair = _frame(tokenizer, "a", "b") if tokenizer.sep_token_id is not None else []
            self._frame = pair if len(pair) == 3 else _frame(tokenizer, "a")
        self._pair = len(self._frame) == 3
        self.segmented = self._pair and "token_type_ids" in tokenizer.model_input_names

    def rows(self, claim: Claim, kind: Kind, per: Per) -> list[Row]:
        """The rows that score a claim."""
        pieces = claim.text.split(self._separator)
        full = [k for k, piece in enumerate(pieces) if piece.strip()]
        if kind == "token":
            return [self._steps_row(claim.question, [pieces[k] for k in full] or [""], per)]
        texts = [self._separator.join(pieces[: k + 1]) for k in full] if per == "step" else []
        return [self._text_row(claim.question, text) for text in texts or [claim.text]]

    def _text_row(self, question: Prompt, text: str) -> Row:
        if not self._chat:
            return self._framed(question, self._codec.encode_text(text)) if self._pair else self._joined(question, text)
        turns = conversation(question)
        if continues(turns):  # the claim goes on from what the assistant was made to say
            turns[-1] = {**turns[-1], "content": turns[-1]["content"] + text}
        elif text.strip():
            turns.append({"role": "assistant", "content": text})
        tokens = (*self._codec.encode(turns), *self._closing)
        return Row(tokens, (0,) * len(tokens), ())

    def _steps_row(self, question: Prompt, steps: Sequence[str], per: Per) -> Row:
        tokens: list[int] = []
        ends: list[int] = []
        for step in steps:
            tokens += [*self._codec.encode_text(step), *self._mark]
            ends.append(len(tokens) - 1)
        row = self._framed(question, tokens, chat=self._codec.encode(question) if self._chat else None)
        begin = len(row.tokens) - len(self._frame[-1]) - len(tokens)
        return Row(row.tokens, row.segments, tuple(begin + end for end in (ends if per == "step" else ends[-1:])))

    def _joined(self, question: Prompt, text: str) -> Row:
        before, after = self._frame
        tokens = (*before, *self._codec.encode_text(_asked(question) + _GAP + text), *after)
        return Row(tokens, (0,) * len(tokens), ())

    def _framed(self, question: Prompt, answer: Sequence[int], chat: Sequence[int] | None = None) -> Row:
        """The question's tokens, then the answer's, with the special tokens around them."""
        if chat is not None:
            first: Sequence[int] = chat
        elif self._pair:
            before, between, _ = self._frame
            first = [*before, *self._codec.encode_text(_asked(question)), *between]
        else:
            first = [*self._frame[0], *self._codec.encode_text(_asked(question) + _GAP)]
        second = [*answer, *self._frame[-1]]
        return Row((*first, *second), (0,) * len(first) + (1,) * len(second), ())


def _asked(question: Prompt) -> str:
    """The question as one text."""
    turns = normalized(conversation(question), Generic())
    return str(turns[0]["content"]) if len(turns) == 1 and turns[0]["role"] == "user" else plain(turns, Generic())


def _frame(tokenizer: PreTrainedTokenizerBase, *texts: str) -> list[list[int]]:
    """The special tokens before, between and after the texts that a tokenizer encodes."""
    encoded = tokenizer(*texts, return_special_tokens_mask=True)
    parts: list[list[int]] = [[]]
    inside = False
    for token, special in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
        if special and inside:
            parts.append([])
        if special:
            parts[-1].append(token)
        inside = not special
    return [*parts, []] if inside else parts


def _closing(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template writes after the assistant's text."""
    turns = [{"role": "user", "content": "Question?"}, {"role": "assistant", "content": "Answer."}]
    try:
        whole, cut = (
            str(tokenizer.apply_chat_template(turns, tokenize=False, continue_final_message=more))
            for more in (False, True)
        )
    except (TemplateError, TypeError, ValueError):
        whole, cut = "", "?"
    if not whole.startswith(cut):
        warnings.warn(
            "the reward model's chat template does not tell how a turn of the assistant ends, so its score is read at "
            "the end of the text: set another tokenizer.chat_template if it was trained otherwise",
            stacklevel=5,
        )
        return ""
    return whole.removeprefix(cut)
