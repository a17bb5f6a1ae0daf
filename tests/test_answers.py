"""Answers in what models write, and whether two of them say the same."""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
from fractions import Fraction
from pathlib import Path

import math_verify
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rksc_agents.errors import ConfigError
from rksc_agents.reasoning.answers import (
    EXTRACTORS,
    AnswerIs,
    Boxed,
    ChoiceLetter,
    Hash,
    LastNumber,
    extract_answer,
)
from rksc_agents.reasoning.equivalence import equivalent, parsable
from rksc_agents.reasoning.spelling import numeral, plain

DATA = Path(__file__).parent / "data"


def rows(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


BOXED = [
    ("So the total is \\boxed{18}.", "18"),
    ("\\boxed{\\frac{1}{2}}", "1/2"),
    ("\\boxed{\\frac{\\sqrt{2}}{2}}", "\\frac{\\sqrt{2}}{2}"),
    ("$\\boxed{1{,}234}$", "1234"),
    ("\\boxed{18\\text{ dollars}}", "18"),
    ("\\boxed{5 \\text{ cm}}", "5 cm"),
    ("first \\boxed{3}, no: \\boxed{4}", "4"),
    ("\\boxed{7} and \\boxed{8", "7"),
    ("\\boxed 5", "5"),
    ("\\boxed{}  The answer is 3.", "3"),
    ("\\fbox{-3}", "-3"),
    ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
    ("\\boxed{x^{2}+1}", "x^{2}+1"),
]

HASH = [
    ("She makes 9*2=18.\n#### 18", "18"),
    ("#### $1,234.50", "1234.50"),
    ("#### -5", "-5"),
    ("#### 18 dollars per day", "18"),
    ("#### Step 1: Count the eggs\n16 - 7 = 9\n#### Step 2: Sell\n9 * 2 = 18 dollars.", "18"),
    ("#### Answer: 42", "42"),
    ("#### Yes", "Yes"),
    ("#### 50%", "50%"),
    ("#### **18**", "18"),
    ("#### 1. Compute the sum\nIt is 4 + 5 = 9", "9"),
    ("#### Conclusion\nThe answer is 7.", "7"),
]

SAYS = [
    ("The answer is 18.", "18"),
    ("The answer is: 18", "18"),
    ("**Answer:** 18", "18"),
    ("**Final Answer:** $18", "18"),
    ("Therefore, the answer is $18.00 per day.", "18.00"),
    ("The final answer is **-3**.", "-3"),
    ("Final Answer\n\n18", "18"),
    ("The answer is 3.5.", "3.5"),
    ("The answer is 1,234,567.", "1234567"),
    ("The answer is 50%.", "50%"),
    ("The answer is \\(\\frac{3}{4}\\).", "3/4"),
    ("The answer is 6 * 3 = 18.", "18"),
    ("The answer is x = 5.", "x = 5"),
    ("The correct answer is (B).", "B"),
    ("The correct answer is B) Paris.", "B"),
    ("The answer is B. Paris is the capital", "B"),
    ("The answer is Paris.", "Paris"),
    ("The answer is 5. Wait, the answer is 6.", "6"),
    ("The answer is not 5. Let me see: 7", "7"),
    ("Answer: 18 eggs because 16 + 2 = 18", "18"),
    ("The answer is 2/3 of a cup.", "2/3"),
    ("the answer to the question is therefore 12", "12"),
    ("The result is 3 × 10^8 m/s.", "3e8 m"),
    ("The answer is approximately 3.14", "3.14"),
    ("Answer: \n\n**42**\n", "42"),
    ("The answer is:\n\\[\n 12 \n\\]", "12"),
    ("The correct option is C.", "C"),
    ("The answer is 3 or 4.", "3 or 4"),
    ("The answer is five million, i.e. 5 million.", "five million, i.e. 5 million"),
    ("The answer is A", "A"),
    ("The answer is A dog.", "A dog"),
    ("The answer is -1/2", "-1/2"),
    ("Answer: True", "True"),
    ("The answer is $\\$18$.", "18"),
    ("The answer is 10:30 am.", "10:30 am"),
    ("The answer is 0.5", "0.5"),
    ("The answer is .5", "0.5"),
    ("the final answer is 7! I hope it is correct.", "7"),
]

CHOICE = [
    ("B", "B"),
    ("(C)", "C"),
    ("Let us see.\n\n**D**", "D"),
    ("B) Paris", "B"),
    ("Option A", "A"),
    ("A dog ran.", None),
    ("I think 5 dogs.", "5"),
]

NUMBER = [
    ("In total 16 - 7 = 9 eggs, and 9 * 2 = 18.", "18"),
    ("He pays $1,234.56 in all.", "1234.56"),
    ("That leaves -5 degrees", "-5"),
    ("10-3", "3"),
    ("50% of them", "50%"),
    ("So 2/3 of it", "2/3"),
    ("1. Add 3 and 4\n2. You get 7\n3. Done", "7"),
    ("H2O has 3 atoms", "3"),
    ("It costs €20.", "20"),
    ("the temperature is −4", "-4"),
    ("we get 5 million", "5 million"),
    ("about 1.5e3 units", "1.5e3"),
    ("\\frac{3}{4} remain", "3/4"),
    ("no number here", None),
    ("", None),
    ("   \n", None),
    ("on the 3rd day he had 12", "12"),
    ("16-3-4=9. 9*2=$18", "18"),
    ("It is 18.", "18"),
    ("She has 18, and", "18"),
    ("20 years", "20"),
    ("x=10^3", "10^3"),
    ("costs 3,4,5", "5"),
    ("100m2", "100"),
    ("$ 18", "18"),
    ("18$", "18"),
    ("He has (−2)", "-2"),
    ("3.", "3"),
    ("0.75", "0.75"),
    (".75", "0.75"),
    ("= 2 \\times 10^{3}", "2e3"),
    ("12,5", "5"),
]

LETTERS = [
    ("The answer is (B).", "B"),
    ("I'd say C because of x", "C"),
    ("A is wrong. The best choice is D", "D"),
    ("\\boxed{B}", "B"),
    ("\\boxed{\\text{(C)}}", "C"),
    ("A dog is big", None),
    ("b", None),
    ("Let's see: (A) no, (C) yes", "C"),
    ("Answer: E", "E"),
    ("**B**. Because", "B"),
    ("#### D", "D"),
    ("The correct option is B: 12", "B"),
    ("F", None),
    ("Therefore, option B is correct.", "B"),
    ("The answer is a", "A"),
    ("(A) 3\n(B) 4\nI pick (A), since 1 + 2 = 3.", "A"),
]

SAME = [
    ("18", "18.00"),
    ("18", "$18"),
    ("18", "18 dollars"),
    ("18", "\\boxed{18}"),
    ("$18", "$18.00$"),
    ("1/2", "0.5"),
    ("(A)", "A"),
    ("A.", "a"),
    ("1,234", "1234"),
    ("1{,}234", "1234"),
    ("50%", "0.5"),
    ("50\\%", "50 percent"),
    ("50%", "50"),
    ("\\frac{1}{2}", "0.5"),
    ("\\dfrac12", "1/2"),
    ("3½", "3.5"),
    ("3 1/2", "7/2"),
    ("12\\frac{1}{2}", "12.5"),
    ("x²", "x^2"),
    ("90°", "90"),
    ("90^\\circ", "90 degrees"),
    ("5 million", "5,000,000"),
    ("3\\times 10^8", "300000000"),
    ("1.5e3", "1500"),
    ("−5", "-5"),
    ("- 5", "-5"),
    ("(x+1)^2", "x^2+2x+1"),
    ("\\sqrt{2}/2", "1/\\sqrt2"),
    ("sqrt(2)", "√2"),
    ("x=5", "5"),
    ("x = 5", "x=5"),
    ("Paris", "paris."),
    ("**18**", "18"),
    ("18 eggs per day at the market", "18"),
    ("5cm", "5 centimeters"),
    ("\\text{Yes}", "yes"),
    ("\\{1,2\\}", "2, 1"),
    ("ln 2", "\\ln(2)"),
    ("2pi", "2\\pi"),
    ("(0, 1)", "(0,1)"),
    ("18!", "18!"),
    ("3!", "6"),
    ("0.333333", "1/3"),
    ("\\$18", "18"),
    ("18$", "18"),
    ('"18"', "18"),
    ("A)", "A"),
    ("x\\in(5,\\infty)", "x>5"),
    ("e^{2x}", "e^{2 x}"),
    ("5 + 3i", "3i+5"),
    ("-\\frac{1}{2}", "-0.5"),
    ("\\frac{-1}{2}", "-1/2"),
    ("18 dollars", "$18 per day"),
    ("True, False", "true,false"),
    ("y=2x+1", "2x+1"),
    ("10:30", "10:30"),
    ("", ""),
    ("x=5 cm", "5 cm"),
    ("\\tan(x)", "\\frac{\\sin(x)}{\\cos(x)}"),
    ("18 eggs", "18 duck eggs"),
    ("2 hours", "2 hrs"),
    ("50% of them", "50%"),
]

DIFFERENT = [
    ("3 or 4", "3"),
    ("3 or 4", "4"),
    ("5 cm", "5 m"),
    ("2pi", "2"),
    ("2 pi", "2"),
    ("18", "19"),
    ("5 am", "5 pm"),
    ("x", "y"),
    ("1/3", "0.33"),
    ("0.0000001", "0.0000002"),
    ("5x", "5"),
    ("5 x", "5"),
    ("-5", "5"),
    ("A", "B"),
    ("Paris", "London"),
    ("10000001", "10000002"),
    ("3 squared", "3"),
    ("5 million", "5"),
    ("(1,2)", "(2,1)"),
    ("10:30", "10:45"),
    ("1st", "1"),
    ("", "18"),
    (".", "0"),
    ("True", "False"),
    ("2/3", "3/2"),
    ("3 to 1", "3"),
    ("not 5", "5"),
    ("2x^2 + 5", "6x^2 + 4x + 6"),
    ("x^2+1", "x^2+2"),
    ("0.100 M NaCl", "0.100 M HCl"),
    ("420 ns", "420 ps"),
    ("1,000 J", "1,000,000 J"),
    ("72 ÷ 9 = 8", "9 + 72 = 81"),
    ("x=3", "y=3"),
    ("G = {e}", "a^3 = e"),
    ("x^2=5", "5"),
    ("50 cents", "50 dollars of mine"),
    ("90% of students who study get high grades", "90% of students who get high grades study a lot"),
    ("18 eggs", "18 hens"),
    ("1/0", "5"),
    ("\\frac{", "5"),
]

PATHOLOGICAL = [
    "9^9^9^9",
    "9^{9^{9^9}}",
    "((9^{99})^{99})^{99}",
    "9**9**9**9",
    "2^{999999999}",
    "2^(99999999)",
    "10000000!",
    "(5!)!",
    "((3!)!)!",
    "(x+1)^{1000}",
    "(1+x)^{16}(1+y)^{16}",
    r"\sum_{i=1}^{1000000} i",
    r"\int x^x dx",
    r"\binom{99999999}{5555555}",
    "e^{e^{e^9}}",
    "(" * 500 + "1" + ")" * 500,
    "+".join(["x"] * 200),
    r"\sin(x)=\exp(x)1000i",
]

# one step of the algebra system would make a number of millions of digits
EXPLOSIVE = [("17^{6}+\\log(x)", "(17^{6}+\\log(x))*2"), ("\\ln(x)", "24137569"), ("\\log(x)", "y-9999*9999*9999")]


@pytest.mark.parametrize(("a", "b"), EXPLOSIVE)
def test_logarithms_beside_large_numbers_are_not_combined(a: str, b: str) -> None:
    assert not equivalent(a, b)
    assert not equivalent(b, a)


def test_logarithms_beside_small_numbers_are_compared() -> None:
    assert equivalent("\\ln(x)+3", "3+\\ln x")
    assert equivalent("\\log_{2}(8)", "3")


@pytest.mark.parametrize(("text", "answer"), BOXED + HASH + SAYS + CHOICE + NUMBER)
def test_the_answer_of_a_text(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(("text", "answer"), LETTERS)
def test_the_letter_of_a_text(text: str, answer: str | None) -> None:
    assert ChoiceLetter()(text) == answer


def test_extractors_find_their_own_kind_only() -> None:
    text = "I get 3 of 4.\n#### 5\nThe answer is 6, in a box \\boxed{7}. So 8"
    found = [extractor(text) for extractor in (Boxed(), Hash(), AnswerIs(), LastNumber())]
    assert found[:2] + found[3:] == ["7", "5", "8"]
    assert extract_answer(text) == "7"
    assert [extractor("nothing here") for extractor in (Boxed(), Hash(), AnswerIs(), LastNumber())] == [None] * 4


def test_extractors_have_names() -> None:
    assert sorted(EXTRACTORS) == ["answer-is", "auto", "boxed", "choice", "hash", "last-number"]
    assert EXTRACTORS["auto"]("it is 4, or 5") == "5"
    assert EXTRACTORS["boxed"]("it is 4") is None


def test_letters_beyond_those_asked_for_are_not_found() -> None:
    assert ChoiceLetter("AB")("The answer is (C).") is None
    with pytest.raises(ConfigError, match="capital letters"):
        ChoiceLetter("a1")


@given(text=st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_extraction_never_raises(text: str) -> None:
    for extractor in EXTRACTORS.values():
        found = extractor(text)
        assert found is None or found.strip()


@given(number=st.integers(-(10**9), 10**9), places=st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_a_number_is_found_in_every_form(number: int, places: int) -> None:
    value = Fraction(number, 10**places)
    written = f"{number / 10**places:,.{places}f}"
    forms = ["So it is {}.", "#### {}", "The answer is {}.", "\\boxed{{{}}}", "**Answer:** {} apples"]
    for form in forms:
        answer = extract_answer(form.format(written))
        assert answer is not None
        found = numeral(answer)
        assert found is not None
        assert found.value == value


@pytest.mark.parametrize(("a", "b"), SAME)
def test_answers_that_say_the_same(a: str, b: str) -> None:
    assert equivalent(a, b)
    assert equivalent(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_answers_that_differ(a: str, b: str) -> None:
    assert not equivalent(a, b)
    assert not equivalent(b, a)


@pytest.mark.parametrize("text", PATHOLOGICAL, ids=lambda text: text[:30])
def test_what_could_take_long_is_never_parsed(text: str) -> None:
    assert not parsable(plain(text))
    assert equivalent(text, text)
    assert not equivalent(text, "5")


def test_endless_comparisons_are_given_up_in_any_thread() -> None:
    found: list[object] = []

    def compare() -> None:
        # short and of a common form, and yet it would take minutes
        found.extend([equivalent(r"\sin(x)x^{99}", r"x+\sin(x)"), sys.gettrace()])

    thread = threading.Thread(target=compare)
    before = threading.gettrace()
    thread.start()
    thread.join()
    assert found == [False, before]


def test_the_trace_function_of_a_debugger_comes_back() -> None:
    def mine(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(mine)
    try:
        equivalent("(x+2)^2", "x^2+4x+4")
        assert sys.gettrace() is mine
    finally:
        sys.settrace(before)


def test_comparing_says_nothing_in_the_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (math_verify.parser, math_verify.grader):  # as in a process that has not compared yet
        monkeypatch.setattr(module, "TIMEOUT_WARNING_SHOWN", False)
    with caplog.at_level(logging.WARNING):
        assert equivalent("(x+3)^2", "x^2+6x+9")
    assert caplog.records == []


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_every_text_equals_itself_and_nothing_raises(text: str) -> None:
    assert equivalent(text, text)
    assert equivalent(text, "18") == equivalent("18", text)


def test_gold_answers_equal_themselves_in_every_spelling_and_no_other() -> None:
    golds = [str(row["answer"]) for row in rows("gsm8k_small.jsonl")]
    for gold in golds:
        spellings = [
            f"{gold}.00",
            f"${gold}",
            f"{int(gold):,}",
            f"\\boxed{{{gold}}}",
            f"**{gold}**.",
            f"{gold} eggs a day",
        ]
        assert all(equivalent(gold, spelling) for spelling in spellings), gold
    for a, b in itertools.combinations(golds, 2):
        assert equivalent(a, b) == (int(a) == int(b))


def test_the_choices_of_a_question_differ() -> None:
    for row in rows("mmlu_small.jsonl"):
        choices = [str(choice) for choice in row["choices"]]
        assert all(equivalent(choice, f" {choice}. ") for choice in choices)
        for a, b in itertools.combinations(choices, 2):
            assert not equivalent(a, b), (a, b)


def test_gold_letters_are_found_beside_the_choices_text() -> None:
    for row in rows("mmlu_small.jsonl"):
        letter = str(row["answer"])
        choice = row["choices"]["ABCD".index(letter)]
        for form in (f"The answer is ({letter}) {choice}", f"{letter}", f"Reasoning first.\n\n**{letter}**"):
            assert extract_answer(form) == letter, form
            assert ChoiceLetter()(form) == letter, form


def test_the_data_files_are_whole() -> None:
    assert [len(rows(f"{name}_small.jsonl")) for name in ("gsm8k", "mmlu", "game24")] == [40, 40, 20]
    assert all(len(str(row["question"]).split()) == 4 for row in rows("game24_small.jsonl"))
