"""Answers that follow a grammar and calls of tools, through the whole engine."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import torch

from rksc_agents import (
    BestOfN,
    BranchToken,
    ConfigError,
    Direct,
    ReasoningResult,
    RKSCReasoner,
    SelfConsistency,
    TreeOfThought,
)
from rksc_agents.config import EngineConfig, Sampling
from rksc_agents.model.grammar import Choice, JSONSchema, Lark, Regex
from rksc_agents.model.text import TextCodec
from rksc_agents.testing import NextLogits, ScriptedRunner, scripted_reasoner, scripted_tokenizer

WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "default": 1},
        },
        "required": ["city"],
    },
}
TIME = {"type": "function", "function": {"name": "time", "description": "The time of day."}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "age"],
}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reasoner_of(next_logits: NextLogits, **options: Any) -> RKSCReasoner:
    """A reasoner on a function in place of a model."""
    tokenizer = scripted_tokenizer()
    return RKSCReasoner(
        lambda budget: ScriptedRunner(next_logits, len(tokenizer), budget),
        TextCodec(tokenizer),
        name="function",
        context=2048,
        kv_limit=2**22,
        engine=EngineConfig(),
        sampling=Sampling(temperature=1.0),
        **options,
    )


def flat(_: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(len(scripted_tokenizer()))


def stubborn(_: tuple[int, ...]) -> torch.Tensor:
    """Wants to write the letter a for ever."""
    logits = torch.zeros(len(scripted_tokenizer()))
    logits[scripted_tokenizer().encode("a")[0]] = 50.0
    return logits


@pytest.mark.parametrize("model", [flat, stubborn])
@pytest.mark.parametrize("max_tokens", [40, 60, 200])
@pytest.mark.parametrize("strategy", [Direct(), SelfConsistency(branches=3), BestOfN(branches=2)])
def test_json_is_valid_whatever_the_model_wants(model: NextLogits, max_tokens: int, strategy: Any) -> None:
    with reasoner_of(model) as reasoner:
        result = reasoner.reason("Who?", strategy=strategy, grammar=JSONSchema(PERSON), max_tokens=max_tokens)
    finished = [branch for branch in result.branches if branch.finish_reason != "cancelled"]
    for branch in finished:
        jsonschema.validate(json.loads(branch.text), PERSON)
        assert len(branch.tokens) <= max_tokens
    assert finished


def test_what_takes_more_tokens_than_allowed_is_refused() -> None:
    with reasoner_of(flat) as reasoner, pytest.raises(ConfigError, match="max_tokens = 5 leaves no room"):
        reasoner.reason("Who?", strategy="direct", grammar=JSONSchema(PERSON), max_tokens=5)


@pytest.mark.parametrize(
    ("grammar", "allowed"),
    [
        (Choice("yes", "no"), {"yes", "no"}),
        (Regex("[ab]{2}"), {"aa", "ab", "ba", "bb"}),
        (Lark('start: "x" | "y"'), {"x", "y"}),
    ],
)
def test_text_follows_its_grammar(grammar: Any, allowed: set[str]) -> None:
    with reasoner_of(flat) as reasoner:
        result = reasoner.reason("Which?", strategy=BestOfN(branches=12), grammar=grammar)
    assert {branch.text for branch in result.branches} <= allowed
    assert len({branch.text for branch in result.branches}) > 1
    assert {branch.finish_reason for branch in result.branches} == {"eos"}


def test_log_probabilities_are_the_models_own() -> None:
    """Not those of what the grammar leaves."""
    with reasoner_of(flat) as reasoner:
        (branch,) = reasoner.reason("Which?", strategy="direct", grammar=Choice("a", "b")).branches
    assert branch.logprobs == pytest.approx([-torch.tensor(float(len(scripted_tokenizer()))).log().item()])


def test_without_a_grammar_nothing_is_masked() -> None:
    script = {"Hi": "Hello there!"}
    with scripted_reasoner(script) as reasoner:
        assert reasoner.reason("Hi", strategy="direct").text == "Hello there!"


def test_rows_with_and_without_a_grammar_run_in_one_batch() -> None:
    with scripted_reasoner({"Hi": "Hello!", "Which?\n\nAnswer with one of: yes, no": "yes"}) as reasoner:
        plain = reasoner._submit("Hi", {"strategy": "direct"})
        chosen = reasoner._submit("Which?", {"strategy": "direct", "grammar": Choice("yes", "no")})
        assert (plain.result().text, chosen.result().text) == ("Hello!", "yes")


def test_a_thought_is_continued_inside_its_grammar() -> None:
    """A line of several steps follows the grammar as a whole."""
    grammar = Regex(r"a\nb\nc")
    strategy = TreeOfThought(proposals=2, breadth=1, depth=5)
    with reasoner_of(flat) as reasoner:
        result = reasoner.reason("Which?", strategy=strategy, grammar=grammar, max_tokens=20)
    assert result.text == "a\nb\nc"


# -- votes -----------------------------------------------------------------------------------------


def votes(result: ReasoningResult) -> list[tuple[str, int]]:
    return [(vote.answer, len(vote.branches)) for vote in result.votes]


def asked(script: dict[str, float], seed: int = 0, **options: Any) -> ReasoningResult:
    strategy = SelfConsistency(branches=16, stop=None, vote="majority")
    with scripted_reasoner({"What?": script}) as reasoner:
        return reasoner.reason("What?", strategy=strategy, seed=seed, max_tokens=300, **options)


def test_branches_vote_on_the_call_not_on_its_text() -> None:
    """Spacing, the order of arguments, defaults and the words around a call make no difference."""
    same = {
        call("weather", city="Paris"): 1.0,
        call("weather", city="Paris", days=1): 1.0,
        call("weather", days=1, city="Paris"): 1.0,
        "I look.\n" + call("weather", city="Paris"): 1.0,
    }
    result = asked({**same, call("weather", city="Rome"): 1.5}, tools=[WEATHER, TIME])
    texts = {branch.text for branch in result.branches}
    assert texts == {"", "I look."}
    assert result.tool_calls[0].name == "weather"
    assert result.tool_calls[0].arguments["city"] == "Paris"
    assert [count for _, count in votes(result)] == sorted((count for _, count in votes(result)), reverse=True)
    assert len(result.votes) == 2
    assert result.rule == "majority"
    assert json.loads(str(result.answer)) == [{"name": "weather", "arguments": {"city": "Paris", "days": 1}}]


def test_calls_of_several_tools_at_once() -> None:
    script = {call("weather", city="Paris") + "\n" + call("time"): 1.0}
    result = asked(script, tools=[WEATHER, TIME])
    assert [made.name for made in result.tool_calls] == ["weather", "time"]


def test_a_text_that_calls_nothing_is_an_answer() -> None:
    result = asked({"The answer is 42.": 1.0}, tools=[WEATHER])
    assert (result.text, result.answer, result.tool_calls) == ("The answer is 42.", "42", ())


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_a_forced_call_is_valid_whatever_the_model_wants(choice: str) -> None:
    with reasoner_of(flat) as reasoner:
        result = reasoner.reason(
            "What?", strategy=SelfConsistency(branches=4), tools=[WEATHER, TIME], tool_choice=choice, max_tokens=160
        )
    for branch in result.branches:
        if branch.finish_reason == "cancelled":
            continue
        assert not branch.invalid_tool_calls
        assert branch.tool_calls
        for made in branch.tool_calls:
            schema = {"weather": WEATHER["parameters"], "time": {"type": "object", "maxProperties": 0}}[made.name]
            jsonschema.validate(made.arguments, schema)
            assert choice in ("any", made.name)


def test_one_call_at_most_where_parallel_calls_are_off() -> None:
    with reasoner_of(flat) as reasoner:
        for seed in range(6):
            result = reasoner.reason(
                "What?", strategy="direct", tools=[TIME], tool_choice="any", parallel_tool_calls=False, seed=seed
            )
            assert len(result.tool_calls) == 1


def test_with_none_nothing_is_called_whatever_the_model_wants() -> None:
    """The tools stay in the prompt, so that the turn before it is found in the tree."""
    result = asked({call("time"): 1.0}, tools=[TIME], tool_choice="none")
    assert result.tool_calls == ()
    assert "<tool_call>" not in result.text
    assert all("<tool_call>" not in branch.text for branch in result.branches)
    with scripted_reasoner({"What?": "42"}) as reasoner:
        free = reasoner.reason("What?", tools=[TIME], strategy="direct")
        none = reasoner.reason("What?", tools=[TIME], strategy="direct", tool_choice="none")
    assert (none.text, none.usage.prompt_tokens) == ("42", free.usage.prompt_tokens)


def test_json_is_voted_on_by_value() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    told = JSONSchema(schema)
    question = f"What?\n\n{told.instruction}"
    script = {question: {'{"x": 1.0}': 2.0, '{"x": 1}': 2.0, '{"x": 2}': 1.0}}
    with scripted_reasoner(script) as reasoner:
        strategy = SelfConsistency(branches=16, stop=None, vote="majority")
        result = reasoner.reason("What?", strategy=strategy, grammar=told)
    assert [answer for answer, _ in votes(result)] == ['{"x": 1}', '{"x": 2}']
    assert result.answer == '{"x": 1}'


def test_text_after_tools_can_follow_a_grammar_too() -> None:
    grammar = Choice("yes", "no")
    question = f"What?\n\n{grammar.instruction}"
    script = {question: {"yes": 1.0, call("time"): 1.0, "maybe": 5.0}}
    with scripted_reasoner(script) as reasoner:
        result = reasoner.reason("What?", strategy=BestOfN(branches=12), tools=[TIME], grammar=grammar, max_tokens=80)
    for branch in result.branches:
        assert branch.text in ("yes", "no") or branch.tool_calls
    assert {bool(branch.tool_calls) for branch in result.branches} == {True, False}


def test_what_is_only_thought_about_is_no_call() -> None:
    tokenizer = scripted_tokenizer()
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    written = f"maybe {call('time')}? No: <tool_call> it.</think>\n\n{call('weather', city='Rome')}"

    def writes(tokens: tuple[int, ...]) -> torch.Tensor:
        so_far = str(tokenizer.decode(list(tokens))).rpartition("<think>\n")[2]
        logits = torch.zeros(len(tokenizer))
        logits[tokenizer.encode(written[len(so_far) :][:1] or "<|end|>")[0]] = 50.0
        return logits

    with RKSCReasoner(
        lambda budget: ScriptedRunner(writes, len(tokenizer), budget),
        TextCodec(tokenizer),
        name="thinks",
        context=2048,
        kv_limit=2**22,
        engine=EngineConfig(),
    ) as reasoner:
        result = reasoner.reason("What?", strategy="direct", tools=[WEATHER, TIME], max_tokens=400)
    assert [made.name for made in result.tool_calls] == ["weather"]
    assert result.text == ""
    assert result.thinking.startswith("maybe")


# -- what is shown ------------------------------------------------------------------------------


def test_a_stream_shows_no_call() -> None:
    script = {"What?": "I look.\n" + call("time")}
    with scripted_reasoner(script) as reasoner:
        events = list(reasoner.stream("What?", strategy="direct", tools=[TIME]))
    assert "".join(event.text for event in events if isinstance(event, BranchToken)) == "I look."


def test_thinking_is_streamed_apart_and_counted() -> None:
    with scripted_reasoner({"What?": "<think>hm</think>\n\n42"}) as reasoner:
        *events, last = list(reasoner.stream("What?", strategy="direct"))
    tokens = [event for event in events if isinstance(event, BranchToken)]
    assert "".join(event.thinking for event in tokens) == "hm"
    assert "".join(event.text for event in tokens) == "42"
    assert last.result.usage.completion_tokens_thinking == len("<think>hm</think>\n\n")  # type: ignore[union-attr]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "rain"}, "weather"),
        ({"tools": [WEATHER], "tool_choice": "any", "grammar": Choice("a")}, "forced call"),
        ({"grammar": {"type": "object"}}, "JSONSchema"),
        ({"tools": [{"description": "nameless"}]}, "name"),
        ({"grammar": JSONSchema({"type": "array", "uniqueItems": True})}, "uniqueItems"),
    ],
)
def test_what_cannot_be_is_refused_before_it_runs(options: dict[str, Any], message: str) -> None:
    with reasoner_of(flat) as reasoner, pytest.raises(ConfigError, match=message):
        reasoner.reason("What?", **options)
