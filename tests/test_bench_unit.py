"""The unit of work: a prompt of exactly P tokens that is made of questions alone."""

from __future__ import annotations

import pytest
from bench_units import QUESTIONS
from hypothesis import given, settings
from hypothesis import strategies as st

from rksc_agents.bench.unit import make_unit, make_units
from rksc_agents.errors import ConfigError
from rksc_agents.model.text import TextCodec
from rksc_agents.questions import Question
from rksc_agents.testing import scripted_tokenizer

CODEC = TextCodec(scripted_tokenizer())
ALONE = len(CODEC.encode(QUESTIONS[0].text))
WHOLE = len(
    CODEC.encode("\n\n".join([*(f"{q.text}\nThe answer is {q.answer}." for q in QUESTIONS[1:]), "What is 0 + 0?"]))
)


VARIED = [Question(f"What is {i} x {10**i}?", str(i * 10**i)) for i in range(12)]


@settings(max_examples=40, deadline=None)
@given(st.integers(100, 500))
def test_a_prompt_has_exactly_the_tokens_that_were_asked_for(prefix: int) -> None:
    unit = make_unit(CODEC, VARIED, prefix=prefix)
    assert len(unit.prompt) == prefix
    assert CODEC.encode(unit.question) == unit.prompt
    *examples, asked = unit.question.split("\n\n")
    known = {question.text: f"{question.text}\nThe answer is {question.answer}." for question in VARIED}
    assert known.pop(asked)
    assert len(examples) == unit.examples
    assert any(example.endswith(examples[0]) for example in known.values())
    assert set(examples[1:]) <= set(known.values())
    assert len(set(examples)) == len(examples)


@pytest.mark.parametrize("prefix", [ALONE, WHOLE])
def test_a_prompt_may_be_the_question_alone_or_all_questions(prefix: int) -> None:
    unit = make_unit(CODEC, QUESTIONS, prefix=prefix)
    assert len(unit.prompt) == prefix
    assert unit.examples == (0 if prefix == ALONE else len(QUESTIONS) - 1)


def test_a_prompt_is_examples_with_answers_and_then_the_question() -> None:
    unit = make_unit(CODEC, QUESTIONS, prefix=100)
    first, *rest = unit.question.split("\n\n")
    assert "What is 3 + 3?\nThe answer is 6.".endswith(first)
    assert rest == ["What is 2 + 2?\nThe answer is 4.", "What is 1 + 1?\nThe answer is 2.", "What is 0 + 0?"]
    assert unit.examples == 3


def test_a_question_without_an_answer_is_no_example() -> None:
    questions = [QUESTIONS[0], Question("Who?"), QUESTIONS[1]]
    assert make_unit(CODEC, questions, prefix=50).question.startswith(QUESTIONS[1].text)


@pytest.mark.parametrize("prefix", [150, 184, 218])
def test_an_example_is_left_out_where_a_token_or_two_would_stay_empty(prefix: int) -> None:
    unit = make_unit(CODEC, QUESTIONS, prefix=prefix)
    assert len(unit.prompt) == prefix
    assert "What is 1 + 1?" not in unit.question


def test_the_first_question_that_fits_is_asked() -> None:
    long = Question("Why " * 100 + "?", "because")
    assert make_unit(CODEC, [long, *QUESTIONS], prefix=40).question.endswith("What is 0 + 0?")


def test_every_branch_is_verified_with_the_same_tokens() -> None:
    unit = make_unit(CODEC, QUESTIONS, prefix=50, branches=3, tokens=7)
    asked = CODEC.decode(unit.verification, skip_special_tokens=False)
    assert asked == "<|end|><|user|>Is the answer above correct? Reply YES or NO.<|end|><|assistant|>"
    assert unit.length == 50 + 7 + len(unit.verification)
    assert unit.described() == {
        "prefix": 50,
        "examples": 1,
        "branches": 3,
        "tokens": 7,
        "verification_tokens": len(unit.verification),
        "temperature": 0.7,
    }
    assert unit.sampling.ignore_eos
    assert unit.seeded(5).seed == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix": 0}, "prefix = 0"),
        ({"branches": 0}, "branches = 0"),
        ({"tokens": 0}, "tokens = 0"),
        ({"prefix": ALONE - 1}, f"the shortest question alone makes a prompt of {ALONE} tokens"),
        ({"prefix": WHOLE + 1}, f"all 10 questions together make a prompt of {WHOLE} tokens"),
        ({"prefix": ALONE + 1}, "no cut of an example gives exactly this many tokens"),
        ({"prefix": 100, "context": 128}, "the model's context has 128"),
    ],
)
def test_what_cannot_be_made_is_told(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_unit(CODEC, QUESTIONS, **settings)


def test_several_units_have_different_prompts_of_one_length() -> None:
    units = make_units(CODEC, VARIED, 4, prefix=150, tokens=7)
    assert {len(unit.prompt) for unit in units} == {150}
    assert len({unit.question.rsplit("\n\n", 1)[1] for unit in units}) == 4
    assert len({unit.prompt[:20] for unit in units}) == 4
    assert units[0] == make_unit(CODEC, VARIED, prefix=150, tokens=7)


def test_too_few_questions_for_several_units_are_told() -> None:
    twice = [QUESTIONS[0], QUESTIONS[0]]
    with pytest.raises(ConfigError, match="2 questions make 1 different prompts"):
        make_units(CODEC, twice, 2, prefix=ALONE)
