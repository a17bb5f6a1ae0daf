"""Where a branch stands in a grammar, and how it ends in time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rksc_agents.errors import ConfigError, EngineError, UnsupportedModelError
from rksc_agents.model.closing import Closer, completes, unpacked
from rksc_agents.model.grammar import reason
from rksc_agents.model.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64
"""Grammars that stay compiled."""

RETRIES = 64
"""After how many tokens, at the latest, a completion is looked for again where none was found."""


class Grammars:
    """Compiles grammars for one tokenizer. Every method may be called from several threads.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        A fast tokenizer.
    eos_token_ids : collection of int
        Tokens that end a text; they are allowed exactly where the text is complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int64)
        self._lock = threading.Lock()
        self._wrapped: tuple[LLTokenizer, Vocabulary] | None = None
        self._compiled: OrderedDict[str, Constraint] = OrderedDict()

    def compile(self, lark: str) -> Constraint:
        """Where a branch stands that has written nothing; a text is compiled once, then copied.

        Parameters
        ----------
        lark : str
            A grammar in llguidance's dialect of Lark, or its JSON form of several grammars.

        Raises
        ------
        ConfigError
            If the grammar is malformed, or has what cannot be enforced.
        UnsupportedModelError
            If the tokenizer is not a fast one, or has no end-of-text token.
        """
        with self._lock:  # held while it compiles, so that threads that ask for the same text wait for it
            known = self._compiled.pop(lark, None)
            if known is None:
                known = self._compile(lark)
            self._compiled[lark] = known
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return known.fork()

    def _compile(self, lark: str) -> Constraint:
        tokenizer, vocabulary = self._wrapped = self._wrapped or self._wrap()
        from llguidance import LLMatcher

        matcher = LLMatcher(tokenizer, lark, log_level=0)
        if matcher.is_error():
            raise ConfigError(_refusal(matcher.get_error()))
        constraint = Constraint(matcher, Closer(tokenizer, vocabulary, lark), self._eos, tokenizer.vocab_size)
        constraint.closing()  # every fork knows it then
        return constraint

    def _wrap(self) -> tuple[LLTokenizer, Vocabulary]:
        kind = type(self._tokenizer).__name__
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise UnsupportedModelError(
                f"grammars and enforced tool calls need a fast tokenizer, and this model's is a {kind}: load one that "
                "has a tokenizer.json, or ask without grammar and forced calls"
            )
        from llguidance.hf import from_tokenizer

        own = len(self._tokenizer)
        eos = [token for token in self._eos.tolist() if token < own]
        if not eos:
            raise UnsupportedModelError(
                "grammars cannot be enforced with a model that has no end-of-text token: set eos_token in its "
                "tokenizer, or ask without grammar and forced calls"
            )
        try:
            wrapped = from_tokenizer(self._tokenizer, n_vocab=own, eos_token=eos)
        except (ValueError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"grammars cannot be enforced with this model's tokenizer, a {kind} ({error}): ask without grammar and "
                "forced calls, or load another model"
            ) from error
        return wrapped, Vocabulary(wrapped, frozenset(self._eos.tolist()))


def _refusal(error: str) -> str:
    told = reason(error)
    if "Unimplemented keys: " in told:
        keywords = told.partition("Unimplemented keys: ")[2].strip("[]").replace('"', "")
        return (
            f"the JSON schema uses {keywords}, which cannot be enforced while tokens are drawn: leave that out of the "
            "schema and check it in the result"
        )
    if "Unknown format: " in told:
        name = told.partition("Unknown format: ")[2]
        return (
            f"the JSON schema uses format {name!r}, which is not known: leave it out, or describe the text with "
            '"pattern"'
        )
    if told.startswith("oneOf "):
        return 'the JSON schema uses "oneOf" with alternatives that may overlap, which cannot be enforced: use "anyOf"'
    return f"the grammar cannot be enforced: {told}; change the schema or grammar so that it does without that"


class Constraint:
    """Where one branch stands in a grammar. Not for several threads at once; each fork may have its own.

    Made by :meth:`Grammars.compile`.
    """

    __slots__ = ("_closer", "_ended", "_eos", "_matcher", "_need", "_plan", "_vocabulary", "_wait")

    def __init__(self, matcher: LLMatcher, closer: Closer, eos: NDArray[np.int64], vocabulary: int) -> None:
        self._matcher = matcher
        self._closer = closer
        self._eos = eos
        self._vocabulary = vocabulary
        self._ended = False
        self._plan: list[int] | None = None  # a completion from here, if known
        self._need: int | None = None  # no completion from here is expected to need more tokens
        self._wait = 0  # tokens until a completion is looked for again where none was found

    def fork(self) -> Constraint:
        """A copy that goes its own way."""
        copy = Constraint(self._matcher.deep_copy(), self._closer, self._eos, self._vocabulary)
        copy._ended, copy._plan, copy._need, copy._wait = self._ended, self._plan, self._need, self._wait
        return copy

    @property
    def complete(self) -> bool:
        """Whether the text so far is complete."""
        return self._ended or self._matcher.is_accepting()

    @property
    def done(self) -> bool:
        """Whether the text so far is complete and nothing may follow."""
        return self._ended or (self._matcher.is_accepting() and self._matcher.is_stopped())

    def mask(self, size: int) -> NDArray[np.bool_]:
        """The tokens that may come next, [size].

        Parameters
        ----------
        size : int
            The model's vocabulary; tokens beyond the tokenizer's are not allowed.

        Raises
        ------
        EngineError
            If the grammar grew too complex to follow.
        """
        mask = np.zeros(size, dtype=bool)
        if not self.done:
            known = unpacked(self._matcher.compute_bitmask())[: self._vocabulary]
            if self._matcher.is_error():
                raise EngineError(
                    f"the grammar cannot be followed any further: {reason(self._matcher.get_error())}; make it simpler"
                )
            mask[: len(known)] = known[:size]
        mask[self._eos[self._eos < size]] = self.complete
        return mask

    def take(self, token: int, left: int) -> int:
        """Consume a token and return it, or another one if the text could not be completed in time after it.

        If a completion of the text so far fits into `left` tokens before the call, one fits into what is left after
        it. So a branch whose first completion fits ends with a complete text, whatever the model wants.

        Parameters
        ----------
        token : int
            The token that was drawn.
        left : int
            Tokens that may still be written, with this one.

        Returns
        -------
        int
            The token that was consumed: `token`, or the next one of the shortest completion that is known. Where the
            text is complete and anything else could not be completed again, an end-of-text token.

        Raises
        ------
        EngineError
            If the grammar forbids `token`.
        """
        if self.complete and token in self._eos:
            return self._end(token)
        after = self._matcher.deep_copy()
        if self._ended or not 0 <= token < self._vocabulary or after.try_consume_tokens([token]) != 1:
            raise EngineError(f"token {token} is not allowed here by the grammar: draw among those that mask() allows")
        room = left - 1
        # While there is room for twice what one token can make necessary beyond what may be needed already, no
        # completion can get lost, so none is looked for: what is needed is only estimated, too high. `growth` bounds
        # that for one construct (see `most_growth`); a token that opens two at once has twice that.
        if self._need is not None and self._need + 2 * self._closer.growth <= room:
            self._matcher, self._plan, self._need = after, None, self._need + self._closer.growth
            return token
        plan = self._plan_after(after, token, room)
        if plan is None and self._wait > 0:  # nothing was found a moment ago either
            self._matcher, self._plan, self._wait = after, None, self._wait - 1
            return token
        if plan is None or len(plan) > room:
            plan = self._closer.closing(after)
        if plan is not None and len(plan) <= room:
            self._matcher, self._plan, self._need, self._wait = after, plan, len(plan), 0
            return token
        return self._saved(token, after, plan, left)

    def _saved(self, token: int, after: LLMatcher, plan: list[int] | None, left: int) -> int:
        """What to write where nothing is known to complete the text in time after `token`."""
        rescue = self.closing()
        if rescue is None or len(rescue) > left:
            self._matcher, self._plan, self._need = after, plan, None
            self._wait = 0 if plan is not None else RETRIES
            return token
        if not rescue:
            return self._end(int(self._eos[0]))
        self._matcher.try_consume_tokens(rescue[:1])
        self._plan, self._need = rescue[1:], len(rescue) - 1
        return rescue[0]

    def _end(self, token: int) -> int:
        self._ended, self._plan, self._need = True, [], 0
        return token

    def _plan_after(self, after: LLMatcher, token: int, room: int) -> list[int] | None:
        """What was known to complete the text before `token`, if it still does after it."""
        if after.is_accepting():
            return []
        if self._plan is None:
            return None
        rest = self._plan[1:]
        if self._plan[:1] == [token] or completes(after, rest):
            return rest
        return self._plan if len(self._plan) <= room and completes(after, self._plan) else None

    def closing(self) -> list[int] | None:
        """Tokens of a short completion of the text so far; empty if it is complete, None if none was found."""
        if self.complete:
            return []
        if self._plan is None:
            self._plan = self._closer.closing(self._matcher)
            if self._plan is not None:
                self._need = len(self._plan)
        return list(self._plan) if self._plan is not None else None
