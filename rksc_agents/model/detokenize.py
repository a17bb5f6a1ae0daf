"""Text from tokens as they come: no broken characters, and nothing of a stop text shown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)
_CUT = 16  # tokens decoded together before the older ones are left behind
_MALFORMED = 64  # an unfinished character is over within 4 tokens: this many are no text
_TRIES = 8


class Detokenizer:
    """Decode one sequence token by token, at a constant cost per token.

    A short window of tokens is decoded anew for each token. Its older part is left behind at a place
    where the two parts, decoded apart, give the same text as together, so that no character is cut
    and no leading space lost. White space clean-up is the caller's `decode`'s matter: it must be off.

    Parameters
    ----------
    decode : callable
        Text of a list of token ids.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = ""  # the part of the window's text that was returned
        self._cut_at = _CUT

    def push(self, token: int) -> str:
        """Add `token` and return the text that became certain."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        new = ""
        # By length: an unfinished character can make a decoder spoil the bytes before it for a while.
        if len(certain) > len(self._shown):
            new, self._shown = certain[len(self._shown) :], certain
        if len(self._window) >= (self._cut_at if certain == text else max(self._cut_at, _MALFORMED)):
            new += self._cut(text, clean=certain == text)
        return new

    def finish(self) -> str:
        """Return what was held back; bytes that never became a character come as U+FFFD."""
        text = self._decode(self._window) if self._window else ""
        rest = text[len(self._shown) :]
        self._window, self._shown = [], ""
        return rest

    def _cut(self, text: str, *, clean: bool) -> str:
        """Leave the older tokens of the window behind; return their text not shown yet."""
        size = len(self._window)
        places = range(size - 1, max(size - 1 - _TRIES, 0), -1)
        if not clean:
            shortest = min(len(self._decode(self._window[:k]) + self._decode(self._window[k:])) for k in places)
            if shortest < len(text) - 1:  # whole characters, spoiled by the one that is being written: wait for it
                return ""
        for k in places:
            head, tail = self._decode(self._window[:k]), self._decode(self._window[k:])
            # Some decoders drop the space before the first word of what they decode.
            gap = next((gap for gap in ("", " ") if tail and head + gap + tail == text), None)
            if gap is not None:
                start = len(head) + len(gap)
                new = text[len(self._shown) : start]
                self._window, self._shown = self._window[k:], tail[: max(0, len(self._shown) - start)]
                self._cut_at = _CUT
                return new
        self._cut_at = 2 * size  # try again later, seldom enough to stay linear
        return ""


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, and not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class StopMatcher:
    """Pass text on up to the first stop text, holding back what could become one.

    Parameters
    ----------
    stops : sequence of str
        The stop texts, none empty. When several occur in the text, it ends before the one that
        starts first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Add `text`; return what is certain to be outside of any stop text."""
        if self.stopped or not text:
            return ""
        buffer = self._held + text
        found = [at for at in map(buffer.find, self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return buffer[: min(found)]
        hold = max((overlap(buffer, stop) for stop in self._stops), default=0)
        certain = len(buffer) - hold
        self._held = buffer[certain:]
        return buffer[:certain]

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one branch, token by token.

    Parameters
    ----------
    decode : callable
        Text of a list of token ids.
    skipped : collection of int
        Tokens without text: the special tokens.
    stop : sequence of str
        Texts before which the text ends.
    stop_tokens : collection of int
        Tokens at which the text ends: the stop texts that are special tokens.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        *,
        skipped: Collection[int] = (),
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stop)
        self._skipped = skipped
        self._stop_tokens = stop_tokens
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All text that is safe to show, never part of a stop text."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def stopped(self) -> bool:
        """Whether a stop text has been seen; `text` ends before it."""
        return self._matcher.stopped

    def push(self, token: int) -> str:
        """Add one token and return the newly safe text, possibly empty. Nothing follows a stop."""
        if self.stopped:
            return ""
        if token in self._stop_tokens:
            new = self.finish()
            self._matcher.stopped = True
            return new
        if token in self._skipped:
            return ""
        return self._add(self._matcher.feed(self._detokenizer.push(token)))

    def finish(self) -> str:
        """Return the text that was held back: the sequence is over."""
        if self.stopped:
            return ""
        return self._add(self._matcher.feed(self._detokenizer.finish()) + self._matcher.finish())

    def _add(self, new: str) -> str:
        if new:
            self._parts.append(new)
        return new
