"""Grammars of answers with tool calls: what a family writes fits, all else does not."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from rksc_agents.errors import ConfigError
from rksc_agents.form import Form
from rksc_agents.model.constraint import Grammars
from rksc_agents.model.text import TextCodec
from rksc_agents.model.tools import ToolFormat, tools_of
from rksc_agents.model.tools.hermes import Generic, Hermes
from rksc_agents.model.tools.llama import Llama
from rksc_agents.model.tools.mistral import Mistral, MistralArgs
from rksc_agents.model.tools.qwen_xml import QwenXML
from rksc_agents.testing import scripted_tokenizer
from rksc_agents.types import ToolCall

SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "note": {"type": "string"},
        "unit": {"enum": ["cm", "m"]},
        "at": {"$ref": "#/$defs/point"},
    },
    "required": ["count"],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = tools_of([{"name": "ns.put-1", "parameters": SCHEMA}, {"name": "stop"}])
FORMATS = [Hermes(), Generic(), Llama(), Mistral(), MistralArgs(), QwenXML()]
OTHERS = ["<think>", "</think>", "<|image|>"]
END = "<|end|>"


def tokenizer_with(added: Iterable[str], *, special: bool) -> PreTrainedTokenizerFast:
    tokenizer = scripted_tokenizer()
    tokens = [AddedToken(text, special=special, normalized=False) for text in (*added, *OTHERS)]
    tokenizer.add_tokens(tokens, special_tokens=special)
    return tokenizer


class Answers:
    """What fits the grammar of one family, on a vocabulary with one token per byte and some for markers."""

    def __init__(self, form: ToolFormat, markers: str, choice: str = "auto", *, parallel: bool = True) -> None:
        self.tokenizer = tokenizer_with(form.tokens if markers != "text" else (), special=markers == "special")
        ids = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}
        lark = form.lark(TOOLS, choice, parallel, ids, {ids[END]})
        self.matcher = LLMatcher(from_tokenizer(self.tokenizer), lark, log_level=0)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def fit(self, text: str) -> bool:
        """Whether a text may be written, and may end there."""
        matcher = self.matcher.deep_copy()
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def call(name: str = "ns.put-1", **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


GOOD = [
    [call(count=3)],
    [call("stop")],
    [call(count=-1, note='"quoted" {}[]\nand </b> é世', unit="cm", at={"x": 0.5})],
]
TWO = [call(count=1), call("stop")]
BAD = [
    [call("put", count=3)],
    [call("ns_put-1", count=3)],
    [call(count="three")],
    [call(count=1.5)],
    [call(note="no count")],
    [call()],
    [call(count=3, more=1)],
    [call(count=3, unit="km")],
    [call(count=3, at={"x": 1, "y": 2})],
    [call("stop", x=1)],
]
TEXTS = [
    "",
    "Hello.",
    "<b>a { b</b> [1] \n\n; é",
    "<tool",
    "</tool_call>",
    "[TOOL",
    "<think>so</think>It is <|image|>.",
]

every_vocabulary = pytest.mark.parametrize("markers", ["text", "added", "special"])
every_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)


@every_format
@every_vocabulary
def test_a_free_answer_is_text_or_calls_or_one_and_then_the_other(form: ToolFormat, markers: str):
    answers = Answers(form, markers)
    for text in TEXTS:
        if markers == "text" or text not in form.tokens:
            assert answers.fit(text), text
    for calls in [*GOOD, TWO]:
        assert answers.fit(form.spell(calls)), calls
    for calls in BAD:
        assert not answers.fit(form.spell(calls)), calls
    assert not answers.fit(form.spell(TWO) + " and more")
    assert not answers.fit(form.spell(TWO)[:-1])
    if form.name == "llama3":  # a call is the whole answer
        assert not answers.fit('{"a": 1}')
        assert answers.fit(" {")
    else:
        assert answers.fit("<think>so</think>\n\nI look.\n" + form.spell(TWO))
        assert not answers.fit("I look.\n" + form.spell(BAD[0]))
        assert not answers.fit(f"Then {form.markers[0]} is written.")


@every_format
@every_vocabulary
def test_a_forced_answer_is_calls_and_nothing_else(form: ToolFormat, markers: str):
    answers = Answers(form, markers, "any")
    for calls in [*GOOD, TWO]:
        assert answers.fit(form.spell(calls)), calls
    for calls in BAD:
        assert not answers.fit(form.spell(calls)), calls
    for text in [*TEXTS, "Hi.\n" + form.spell(GOOD[0]), form.spell(GOOD[0]) + " ", form.spell(GOOD[0])[:-1]]:
        assert not answers.fit(text), text


@every_format
@every_vocabulary
def test_a_named_tool_is_called_once(form: ToolFormat, markers: str):
    answers = Answers(form, markers, "ns.put-1")
    assert answers.fit(form.spell([call(count=3)]))
    for calls in [*BAD, TWO, [call("stop")], [call(count=3), call(count=3)]]:
        assert not answers.fit(form.spell(calls)), calls


@every_format
@every_vocabulary
def test_with_none_there_is_text_without_markers(form: ToolFormat, markers: str):
    answers = Answers(form, markers, "none")
    for text in TEXTS:
        if markers == "text" or text not in form.tokens:
            assert answers.fit(text), text
    for text in (form.markers[0], f"Then {form.markers[0]} is written.", f"<think>so</think>{form.markers[0]}"):
        assert not answers.fit(text), text
    assert answers.fit(form.spell(TWO)) is (form.name == "llama3")  # JSON is text where no call may be


@every_format
@every_vocabulary
@pytest.mark.parametrize("choice", ["auto", "any"])
def test_without_parallel_calls_there_is_one(form: ToolFormat, markers: str, choice: str):
    answers = Answers(form, markers, choice, parallel=False)
    assert answers.fit(form.spell(TWO[:1]))
    assert not answers.fit(form.spell(TWO))


def written(form: ToolFormat, markers: str, choice: str, seed: int) -> str:
    """What a model writes that draws every token that it may with the same probability, in 300 tokens at most."""
    tokenizer = tokenizer_with(form.tokens if markers != "text" else (), special=markers == "special")
    ids = {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    end = ids[END]
    place = Grammars(tokenizer, {end}).compile(form.lark(TOOLS, choice, True, ids, {end}))
    rng = random.Random(seed)
    tokens: list[int] = []
    while not place.done:
        allowed = np.flatnonzero(place.mask(len(tokenizer))).tolist()
        tokens.append(place.take(rng.choice(allowed), 300 - len(tokens)))
    return str(tokenizer.decode([token for token in tokens if token != end]))


@every_format
@every_vocabulary
@pytest.mark.parametrize("choice", ["any", "ns.put-1"])
def test_whatever_is_written_under_a_forced_choice_is_read_as_calls(form: ToolFormat, markers: str, choice: str):
    for seed in range(6):
        text = written(form, markers, choice, seed)
        parsed = form.parse(text, TOOLS)
        assert parsed.calls, text
        assert (parsed.content, parsed.invalid) == ("", ()), text
        for each in parsed.calls:
            assert each.arguments.keys() <= (SCHEMA["properties"].keys() if each.name == "ns.put-1" else set()), text


def test_llamas_marker_may_stand_before_a_call():
    answers = Answers(Llama(), "special")
    assert answers.fit("<|python_tag|>" + Llama().spell(TWO))
    assert not answers.fit("<|python_tag|>print(1)")


def test_mistrals_list_may_follow_a_space():
    answers = Answers(Mistral(), "special", "any")
    assert answers.fit(Mistral().spell(TWO).replace("[{", " [{", 1))


def test_an_end_token_ends_a_free_answer_and_is_no_part_of_it():
    tokenizer = scripted_tokenizer()
    end = tokenizer.eos_token_id
    place = Grammars(tokenizer, {end}).compile(Hermes().lark(TOOLS, "auto", True, {END: end}, {end}))
    for token in tokenizer.encode("Hello."):
        place.take(token, 100)
    assert place.mask(len(tokenizer))[end]
    assert place.take(end, 100) == end
    assert place.done
    tokens = {END: 7, "<think>": 8, "<tool_call>": 9, "</tool_call>": 10}
    assert "<[8]>" in Hermes().lark(TOOLS, "auto", True, tokens, {7})
    assert "<[7,8]>" in Hermes().lark(TOOLS, "auto", True, tokens)


def test_a_call_that_asks_for_an_answer_leaves_out_the_ends_of_its_model(monkeypatch: pytest.MonkeyPatch):
    tokenizer = tokenizer_with([*Hermes.tokens, "<|im_end|>"], special=True)
    codec = TextCodec(tokenizer)
    grammars: list[str] = []
    monkeypatch.setattr(codec.grammars, "compile", grammars.append)
    Form(TOOLS).constraint(codec, False)
    spoken = {int(number) for found in re.findall(r"<\[([\d,]+)\]>", grammars[0]) for number in found.split(",")}
    ends = {tokenizer.eos_token_id, codec.added["<|im_end|>"]}
    assert ends <= codec.eos_token_ids
    assert spoken == set(codec.added.values()) - codec.eos_token_ids
    assert codec.added["<think>"] in spoken


@pytest.mark.parametrize("markers", ["text", "added"])
def test_a_text_with_closing_tags_is_written_and_read(markers: str):
    note = "</parameter></function> </parameter>\n</function>\n<parameter=x>"
    text = QwenXML().spell([call(count=3, note=note, unit="cm"), call("stop")])
    assert Answers(QwenXML(), markers, "any").fit(text)
    assert QwenXML().parse(text, TOOLS).calls == (call(count=3, note=note, unit="cm"), call("stop"))


def test_arguments_are_spaced_as_templates_write_them():
    answers = Answers(Hermes(), "text", "any")
    text = Hermes().spell([call(count=3, note="x")])
    assert answers.fit(text)
    assert not answers.fit(text.replace(": ", ":"))
    assert not answers.fit(text.replace(", ", ","))


def test_a_tool_of_any_arguments_takes_any():
    (tool,) = tools_of([{"name": "f", "parameters": {"type": "object"}}])
    lark = Hermes().lark([tool], "any", True, {})
    tokenizer = scripted_tokenizer()
    matcher = LLMatcher(from_tokenizer(tokenizer), lark, log_level=0)
    tokens = tokenizer.encode(Hermes().spell([ToolCall(name="f", arguments={"x": [1, {"y": None}]})]))
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


def test_what_cannot_be_enforced_is_a_typed_error():
    schema = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}
    tokenizer = scripted_tokenizer()
    for form in FORMATS:
        lark = form.lark(tools_of([{"name": "f", "parameters": schema}]), "any", True, {})
        if form.name == "qwen-xml":  # a parameter of no known type is text
            continue
        with pytest.raises(ConfigError, match="not"):
            Grammars(tokenizer, {tokenizer.eos_token_id}).compile(lark)
    odd = tools_of([{"name": "f", "parameters": {"properties": {"a>b": {"type": "integer"}}}}])
    with pytest.raises(ConfigError, match="parameter 'a>b'"):
        QwenXML().lark(odd, "any", True, {})


def test_a_schema_is_written_once_for_each_tool():
    many = tools_of([{"name": f"t{number}", "parameters": SCHEMA} for number in range(20)])
    lark = Hermes().lark(many, "any", True, {})
    assert lark.count(json.dumps("cm")) == len(many)
