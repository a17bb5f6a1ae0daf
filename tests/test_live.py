"""What a reader sees of a text while it grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rksc_agents.model.live import LiveText, thinking_length
from rksc_agents.model.thinking import split_thinking

WORDS = ["a", " ", "\n", "<", ">", "/", "think", "word "]
MARKERS = ["<think>", "</think>", "[THINK]", "[/THINK]"]
CHANNELS = ["<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<|start|>assistant"]
PIECES = st.sampled_from([[*WORDS, *MARKERS], [*WORDS, *CHANNELS]]).flatmap(  # no model uses both
    lambda pieces: st.lists(st.sampled_from(pieces), max_size=24)
)


def shown(live: LiveText, pieces: list[str]) -> tuple[str, str]:
    parts = [live.push(piece) for piece in pieces]
    return "".join(thinking for thinking, _ in parts), "".join(answer for _, answer in parts)


@given(PIECES, st.booleans())
def test_what_is_shown_is_the_beginning_of_what_it_is_in_the_end(pieces: list[str], opened: bool) -> None:
    thinking, answer = shown(LiveText(opened=opened), pieces)
    whole = split_thinking("".join(pieces), opened=opened)
    assert whole[0].startswith(thinking)
    assert whole[1].startswith(answer)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["It ", "is ", "42."], ("", "It is 42.")),
        (["<th", "ink>", "six ", "times", "</thi", "nk>\n\n", "42"], ("six times", "42")),
        (["1 <", " 2"], ("", "1 < 2")),
        (["\n<think>a</think>", "b"], ("a", "b")),
        (["one <think>", " is a marker"], ("", "one ")),  # never closed: known only at the end
        (["one <think>", "x</think>", " two"], ("x", "one two")),
        (["<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final",
          "<|message|>", "42"], ("hm", "42")),
    ],
)  # fmt: skip
def test_thinking_and_answer_come_apart(pieces: list[str], expected: tuple[str, str]) -> None:
    assert shown(LiveText(), pieces) == expected


def test_a_text_may_start_inside_a_block() -> None:
    assert shown(LiveText(opened=True), ["hm", "</think>", "42"]) == ("hm", "42")


def test_nothing_is_shown_from_a_call_on() -> None:
    live = LiveText(markers=("<tool_call>",))
    assert shown(live, ["I look", ".\n", "<tool", "_call>", '{"name"', "}</tool_call> more"]) == ("", "I look.")


def test_what_only_looks_like_a_call_is_shown_once_it_is_none() -> None:
    live = LiveText(markers=("<tool_call>",))
    assert shown(live, ["a <tool", "s> b"]) == ("", "a <tools> b")


def test_an_answer_that_opens_like_a_call_is_held_back() -> None:
    live = ("{", "```")
    assert shown(LiveText(opens_with=live), [" ", '{"na', 'me": 1}']) == ("", "")
    assert shown(LiveText(opens_with=live), ["`", "``", "json", "{}"]) == ("", "")
    assert shown(LiveText(opens_with=live), ["`", "a` {", "b}"]) == ("", "`a` {b}")


def letters(tokens: object) -> str:
    return "".join(map(chr, tokens))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("text", "opened", "length"),
    [
        ("42", False, 0),
        ("<think>ab</think>\n\n42", False, len("<think>ab</think>\n\n")),
        ("ab</think>42", True, len("ab</think>")),
        ("<think>ab", False, len("<think>ab")),
        ("<think></think>42", False, 0),  # an empty block is no thinking
    ],
)
def test_tokens_of_thinking_are_those_before_the_answer(text: str, opened: bool, length: int) -> None:
    assert thinking_length([ord(c) for c in text], letters, opened=opened) == length
