"""Thinking is told from the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rksc_agents.model.thinking import PAIRS, split_thinking

plain_text = st.text(st.characters(exclude_characters="<>[]|◁▷", exclude_categories=["Cs"]))


@pytest.mark.parametrize(("opening", "closing"), PAIRS)
def test_a_block_of_every_kind_is_separated(opening, closing):
    assert split_thinking(f"{opening}\na\n{closing}\n\n42") == ("a", "42")
    assert split_thinking(f"{opening}\na and") == ("a and", "")
    assert split_thinking(f"a\n{closing}\n\n42", opened=True) == ("a", "42")


@given(plain_text)
def test_text_without_markers_is_the_answer_unchanged(text):
    assert split_thinking(text) == ("", text)


@given(plain_text)
def test_an_opened_block_without_its_end_is_all_thinking(text):
    assert split_thinking(text, opened=True) == (text.strip(), "")


@given(plain_text, plain_text)
def test_block_and_answer_are_both_whole(thinking, answer):
    expected = (thinking.strip(), answer.lstrip())
    assert split_thinking(f"<think>{thinking}</think>{answer}") == expected
    assert split_thinking(f"{thinking}</think>{answer}", opened=True) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Well. <thinking>x</thinking> It is 4.", ("x", "Well. It is 4.")),
        ("<think>a</think>one <think>b</think>two", ("a\n\nb", "one two")),
        ("A<think>x</think><think>y</think> B", ("x\n\ny", "A B")),
        ("<think></think>\n\n4", ("", "4")),
        ("<think>the <think> tag</think>4", ("the <think> tag", "4")),
        ("<think>a</thought>b</think>4", ("a</thought>b", "4")),
        ("4\n<think>is it", ("is it", "4\n")),
        ("Write `<think>` before it.", ("", "Write `<think>` before it.")),
        ("Close with </think> then.", ("", "Close with </think> then.")),
        ("`<think>` or <thought>x</thought>4", ("x", "`<think>` or 4")),
    ],
)
def test_where_blocks_may_stand(text, expected):
    assert split_thinking(text) == expected


def test_a_model_that_opens_again_what_the_prompt_opened():
    assert split_thinking("\n<think>\na</think>4", opened=True) == ("a", "4")


def test_a_second_block_after_the_one_that_the_prompt_opened():
    assert split_thinking("a</think>4 <think>b</think>or 5", opened=True) == ("a\n\nb", "4 or 5")


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        (
            "<|channel|>analysis<|message|>sum<|end|><|start|>assistant<|channel|>final<|message|>It is 4.",
            False,
            ("sum", "It is 4."),
        ),
        ("sum<|end|><|start|>assistant<|channel|>final<|message|>It is 4.<|return|>", True, ("sum", "It is 4.")),
        ("<|channel|>analysis<|message|>sum and", False, ("sum and", "")),
        ("<|channel|>final<|message|>It is 4.", False, ("", "It is 4.")),
        (
            "<|channel|>analysis<|message|>look<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.f<|message|>{"x": 1}<|call|>',
            False,
            ('look\n\n{"x": 1}', ""),
        ),
        (
            "<|channel|>commentary<|message|>I will look it up. <|end|><|start|>assistant<|channel|>final<|message|>4",
            False,
            ("", "I will look it up. 4"),
        ),
    ],
)
def test_channels_of_gpt_oss(text, opened, expected):
    assert split_thinking(text, opened=opened) == expected
