"""What of a growing text a reader may see: its answer and its thinking apart, and no tool call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from rksc_agents.model.detokenize import overlap
from rksc_agents.model.thinking import MARKERS, settled, split_thinking


class LiveText:
    """Split a text into thinking and answer while it grows.

    What is shown is never taken back: what could become a marker, or depends on one that is still open, is held back.
    The parts add up to what :func:`~rksc_agents.model.thinking.split_thinking` makes of the whole text, up to the
    first of `markers`, and up to white space at its end.

    Parameters
    ----------
    opened : bool, default False
        The text starts inside a thinking block.
    markers : sequence of str, default ()
        Texts from which on nothing is shown: they begin a tool call.
    opens_with : sequence of str, default ()
        Nothing is shown of an answer that begins with one of them: it may be a call without a marker.
    """

    def __init__(self, *, opened: bool = False, markers: Sequence[str] = (), opens_with: Sequence[str] = ()) -> None:
        self._opened = opened
        self._markers = tuple(markers)
        self._opens_with = tuple(opens_with)
        self._raw = ""
        self._shown = ["", ""]  # thinking, answer

    def push(self, text: str) -> tuple[str, str]:
        """Add `text`; return the thinking and the answer that became certain."""
        self._raw += text
        return self._new(self._raw[: self._certain()])

    def _certain(self) -> int:
        """How much of the text cannot become something else by what follows."""
        held = max((overlap(self._raw, marker) for marker in (*MARKERS, *self._markers)), default=0)
        certain = self._raw[: len(self._raw) - held]
        return settled(certain, opened=self._opened) if certain.strip() else 0

    def _new(self, certain: str) -> tuple[str, str]:
        thinking, answer = split_thinking(certain, opened=self._opened)
        if self._markers or self._opens_with:
            begun = answer.lstrip()
            if any(begun.startswith(each) or each.startswith(begun) for each in self._opens_with):
                answer = ""
            ends = [at for at in map(answer.find, self._markers) if at >= 0]
            answer = answer[: min(ends, default=len(answer))].rstrip()
        new = []
        for at, text in enumerate((thinking, answer)):
            grown = text.startswith(self._shown[at])
            new.append(text[len(self._shown[at]) :] if grown else "")
            self._shown[at] = text if grown else self._shown[at]
        return new[0], new[1]


def thinking_length(tokens: Sequence[int], decode: Callable[[Sequence[int]], str], *, opened: bool = False) -> int:
    """How many of `tokens` come before the first one of the answer; 0 where there is no thinking."""
    if not split_thinking(decode(tokens), opened=opened)[0]:
        return 0

    def answered(count: int) -> bool:
        return bool(LiveText(opened=opened).push(decode(tokens[:count]))[1].strip())

    return max(0, bisect_left(range(len(tokens) + 1), True, key=answered) - 1)
