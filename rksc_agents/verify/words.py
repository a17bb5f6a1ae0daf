"""The tokens with which a model says YES or NO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rksc_agents.errors import ConfigError

if TYPE_CHECKING:
    from rksc_agents.engine.probe import Groups
    from rksc_agents.model.text import TextCodec

_SPELLINGS = (str.upper, str.capitalize, str.lower)
_BEFORE = ("", " ", "\n")


def verdict_tokens(codec: TextCodec, yes: str = "yes", no: str = "no") -> Groups:
    """Return the tokens that begin an answer YES, and those that begin an answer NO.

    All spellings count (" YES", "YES", " Yes", ...), each that is one token of the vocabulary. Where a vocabulary
    splits the words, their first pieces count.

    Raises
    ------
    ConfigError
        If both words begin with the same pieces, so that one token cannot tell them apart.
    """
    return choice_tokens(codec, [[spelling(word) for spelling in _SPELLINGS] for word in (yes, no)])


def choice_tokens(codec: TextCodec, choices: Sequence[Sequence[str]]) -> Groups:
    """Return for each choice, given by its spellings, the tokens that begin it and no other; see `verdict_tokens`."""
    for whole in (True, False):
        forms = [set().union(*(_forms(codec, spelled, whole) for spelled in spellings)) for spellings in choices]
        groups = [
            form - set().union(*(other for at, other in enumerate(forms) if at != place))
            for place, form in enumerate(forms)
        ]
        if all(groups):
            return tuple(tuple(sorted(group)) for group in groups)
    words = ", ".join(spellings[0] for spellings in choices)
    raise ConfigError(f"the words {words} begin with the same tokens in this vocabulary: choose other words")


def _forms(codec: TextCodec, word: str, whole: bool) -> set[int]:
    """The tokens that spell `word` alone, or that begin it, with and without white space before it."""
    found = set()
    for before in _BEFORE:
        tokens = codec.encode_text(before + word)
        lead = codec.encode_text(before) if before else ()
        if lead and tokens[: len(lead)] == lead:  # the white space is a token of its own
            tokens = tokens[len(lead) :]
        if tokens and (len(tokens) == 1 or not whole):
            found.add(tokens[0])
    return found
