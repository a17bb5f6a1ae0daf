"""Tools are checked, and calls are read and written in each family's way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rksc_agents.errors import ConfigError
from rksc_agents.model.tools import Tool, ToolFormat, choice_of, format_of, tools_of
from rksc_agents.model.tools.hermes import Generic, Hermes, instructions
from rksc_agents.model.tools.llama import Llama
from rksc_agents.model.tools.mistral import Mistral, MistralArgs
from rksc_agents.model.tools.qwen_xml import QwenXML
from rksc_agents.types import ToolCall

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": ["integer", "string"]}},
    "required": ["a"],
}
TOOLS = tools_of([{"name": "add", "description": "Add.", "parameters": ADD}, {"name": "now.utc-2"}])
FORMATS = [Hermes(), Generic(), Llama(), Mistral(), MistralArgs(), QwenXML()]


def add(**arguments: Any) -> ToolCall:
    return ToolCall(name="add", arguments=arguments)


def now() -> ToolCall:
    return ToolCall(name="now.utc-2", arguments={})


# What is offered


def test_a_tool_in_either_form_is_the_same_tool():
    bare = {"name": "add", "description": "Add.", "parameters": ADD}
    wrapped = {"type": "function", "function": bare}
    assert tools_of([bare]) == tools_of([wrapped]) == tools_of(tools_of([bare]))
    assert tools_of([bare])[0].function() == wrapped


def test_what_is_missing_is_empty():
    (tool,) = tools_of([{"name": "now", "description": None, "parameters": None}])
    assert tool == Tool("now", "", {"type": "object", "properties": {}})
    assert tool.required == ()


def test_a_tool_does_not_change_with_what_it_was_made_of():
    schema = json.loads(json.dumps(ADD))
    (tool,) = tools_of([{"name": "add", "parameters": schema}])
    schema["properties"]["a"]["type"] = "string"
    assert tool.parameters == ADD


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("add", "give a list of tools"),
        ({"name": "add"}, "give a list of tools"),
        (["add"], "a tool is 'add'"),
        ([{"type": "function", "function": "add"}], "a tool is"),
        ([{}], "the name None"),
        ([{"name": 7}], "the name 7"),
        ([{"name": ""}], "the name ''"),
        ([{"name": "a b"}], "letters, digits and"),
        ([{"name": "a\n"}], "letters, digits and"),
        ([{"name": "a" * 129}], "at most 128"),
        ([{"name": "auto"}], "'auto', which as tool_choice"),
        ([{"name": "a"}, {"name": "b"}, {"name": "a"}], "two tools are called 'a'"),
        ([{"name": "a", "parameters": []}], "of the type 'object'"),
        ([{"name": "a", "parameters": {"type": "string"}}], "of the type 'object'"),
        ([{"name": "a", "parameters": {"properties": ["x"]}}], "of the type 'object'"),
        ([{"name": "a", "parameters": {"required": "x"}}], "of the type 'object'"),
        ([{"name": "a", "parameters": {"default": float("nan")}}], "'a' are no JSON"),
        ([{"name": "a", "parameters": {"properties": {"x": int}}}], "'a' are no JSON"),
    ],
)
def test_malformed_tools_are_typed_errors(tools: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        tools_of(tools)


def test_every_character_that_a_name_may_hold():
    name = "aZ09_.:/-" + "x" * 119
    assert tools_of([{"name": name}])[0].name == name


def test_what_may_be_chosen():
    assert [choice_of(choice, TOOLS) for choice in ("auto", "any", "none", "add")] == ["auto", "any", "none", "add"]
    assert [choice_of(choice, ()) for choice in ("auto", "none")] == ["auto", "none"]


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("sub", TOOLS, "tool_choice = 'sub'.*add, now.utc-2"),
        ("any", (), "give tools to choose from"),
        (None, TOOLS, "tool_choice = None"),
        ({"name": "add"}, TOOLS, "tool_choice = {"),
    ],
)
def test_a_choice_that_is_none_names_what_there_is(choice: Any, tools: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        choice_of(choice, tools)


def test_what_a_model_without_tools_in_its_template_is_told():
    text = instructions(TOOLS)
    listed = [
        json.loads(line) for line in text.splitlines() if line.startswith('{"name": "') and "the tool's" not in line
    ]
    assert listed == [tool.function()["function"] for tool in TOOLS]
    example = Generic().parse(text, TOOLS)
    assert [call.name for call in example.invalid] == ["the tool's name"]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("", "generic"),
        ("{{ messages }}<tool_call>", "generic"),
        ("{% if tools %}<tools>", "generic"),
        ("{% if tools %}<tool_call>", "hermes"),
        ("{% if tools %}<tool_call>\n<function=", "qwen-xml"),
        ("{% if tools %}<|python_tag|>", "llama3"),
        ("""{% if tools %}ipython {"name": , "parameters": }""", "llama3"),
        ("{% if tools %}[TOOL_CALLS][", "mistral"),
        ("{% if tools %}[TOOL_CALLS]name[ARGS]", "mistral-args"),
    ],
)
def test_the_template_tells_the_format(template: str, name: str):
    assert format_of(template).name == name


# Reading


def outcome(parsed: Any) -> tuple[str, list[ToolCall], list[str | None]]:
    return parsed.content, list(parsed.calls), [each.name for each in parsed.invalid]


JSON_CALL = '{"name": "add", "arguments": {"a": 1}}'
HERMES: list[tuple[str, str, list[ToolCall], list[str | None]]] = [
    (f"<tool_call>\n{JSON_CALL}\n</tool_call>", "", [add(a=1)], []),
    (f"Hi.\n<tool_call>\n{JSON_CALL}\n</tool_call>\nBye.", "Hi.\n\nBye.", [add(a=1)], []),
    (f"<tool_call>{JSON_CALL}</tool_call><tool_call>{JSON_CALL}</tool_call>", "", [add(a=1)] * 2, []),
    (f"<tool_call>\n{JSON_CALL}\n{JSON_CALL}\n</tool_call>", "", [add(a=1)] * 2, []),
    (f"<tool_call>\n[{JSON_CALL}, {JSON_CALL}]\n</tool_call>", "", [add(a=1)] * 2, []),
    (f"<tool_call>\n{JSON_CALL}", "", [add(a=1)], []),
    (f"<tool_call>\n{JSON_CALL}\n<tool_call>\n{JSON_CALL}\n</tool_call>", "", [add(a=1)] * 2, []),
    (f"<tool_call>\n```json\n{JSON_CALL}\n```\n</tool_call>!", "!", [add(a=1)], []),
    (f"<tool_call>\n{JSON_CALL}}}\n</tool_call>", "", [add(a=1)], []),
    ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', "", [add(a=1)], []),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [add(a=1)], []),
    ('<tool_call>{"function": {"name": "add", "arguments": {"a": 1}}}</tool_call>', "", [add(a=1)], []),
    ('<tool_call>{"name": "now.utc-2"}</tool_call>', "", [now()], []),
    ('<tool_call>{"name": "now.utc-2", "arguments": ""}</tool_call>', "", [now()], []),
    ('<tool_call>{"name": "now.utc-2", "arguments": null}</tool_call>', "", [now()], []),
    (
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "}</tool_call>{<tool_call>"}}</tool_call>',
        "",
        [add(a=1, b="}</tool_call>{<tool_call>")],
        [],
    ),
    ('<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x\ny"}}</tool_call>', "", [add(a=1, b="x\ny")], []),
    ('A <tool_call>\n{"name": "add", "argum', "A", [], [None]),
    (f'<tool_call>{JSON_CALL}</tool_call><tool_call>{{"name"', "", [add(a=1)], [None]),
    (f"<tool_call>add(1)<tool_call>{JSON_CALL}</tool_call>", "", [add(a=1)], [None]),
    (f"<tool_call>add(1)</tool_call> or {JSON_CALL}", f"or {JSON_CALL}", [], [None]),
    ('<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "", [], ["sub"]),
    ('<tool_call>{"name": "add", "arguments": {"b": "x"}}</tool_call>', "", [], ["add"]),
    ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "", [], ["add"]),
    ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "", [], [None]),
    ('<tool_call>{"arguments": {}}</tool_call>', "", [], [None]),
    ("<tool_call>" + "[" * 100_000, "", [], [None]),
    (f" A call is spelled {JSON_CALL} ", f" A call is spelled {JSON_CALL} ", [], []),
]
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}'
CASES: list[tuple[ToolFormat, str, str, list[ToolCall], list[str | None]]] = [
    *((Hermes(), *case) for case in HERMES),
    *((Generic(), *case) for case in HERMES),
    (Hermes(), JSON_CALL, "", [add(a=1)], []),
    (Generic(), f" {JSON_CALL}\n", "", [add(a=1)], []),
    (Generic(), f"```json\n{JSON_CALL}\n```", "", [add(a=1)], []),
    (Generic(), '{"name": "add", "arguments": {}}', "", [], ["add"]),
    (Generic(), f"{JSON_CALL} is it", f"{JSON_CALL} is it", [], []),
    (Generic(), '{"name": "sub", "arguments": {}}', '{"name": "sub", "arguments": {}}', [], []),
    (Generic(), '{"name": "add", "age": 7}', '{"name": "add", "age": 7}', [], []),
    (Llama(), LLAMA_CALL, "", [add(a=1)], []),
    (Llama(), JSON_CALL, "", [add(a=1)], []),
    (Llama(), f"\n\n{LLAMA_CALL}\n", "", [add(a=1)], []),
    (Llama(), f"<|python_tag|>{LLAMA_CALL}", "", [add(a=1)], []),
    (Llama(), f"Hi.\n<|python_tag|>{LLAMA_CALL}", "Hi.", [add(a=1)], []),
    (Llama(), f"{LLAMA_CALL}; {LLAMA_CALL}", "", [add(a=1)] * 2, []),
    (Llama(), f"{LLAMA_CALL}\n{LLAMA_CALL};\n", "", [add(a=1)] * 2, []),
    (Llama(), f"<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}", "", [add(a=1)] * 2, []),
    (
        Llama(),
        '{"name": "add", "parameters": {"a": 1, "b": "<|python_tag|>; {"}}',
        "",
        [add(a=1, b="<|python_tag|>; {")],
        [],
    ),
    (Llama(), f'{LLAMA_CALL}; {{"name": "add", "par', "", [add(a=1)], ["add"]),
    (Llama(), f"{LLAMA_CALL} and more", "", [add(a=1)], [None]),
    (Llama(), '{"name": "add", "par', "", [], ["add"]),
    (Llama(), '{"name": "sub", "parameters": {}}', "", [], ["sub"]),
    (Llama(), '{"name": "add", "parameters": {}}', "", [], ["add"]),
    (Llama(), "<|python_tag|>print(1)", "", [], [None]),
    (Llama(), "<|python_tag|>", "", [], [None]),
    (Llama(), '{"name": "Ann", "age": 7}', '{"name": "Ann", "age": 7}', [], []),
    (Llama(), '{"name": "Ann", "ag', '{"name": "Ann", "ag', [], []),
    (Llama(), "{1, 2} is a set", "{1, 2} is a set", [], []),
    (Llama(), f"It is {LLAMA_CALL}", f"It is {LLAMA_CALL}", [], []),
    (Mistral(), f"[TOOL_CALLS][{JSON_CALL}]", "", [add(a=1)], []),
    (Mistral(), f"[TOOL_CALLS] [{JSON_CALL}, {JSON_CALL}]", "", [add(a=1)] * 2, []),
    (Mistral(), f"Hi.[TOOL_CALLS][{JSON_CALL}] Bye.", "Hi. Bye.", [add(a=1)], []),
    (Mistral(), f"[TOOL_CALLS]{JSON_CALL}", "", [add(a=1)], []),
    (Mistral(), f"[TOOL_CALLS]{JSON_CALL}, or so", ", or so", [add(a=1)], []),
    (Mistral(), f"[TOOL_CALLS][{JSON_CALL}", "", [add(a=1)], []),
    (Mistral(), f'[TOOL_CALLS][{JSON_CALL}, {{"name": "ad', "", [add(a=1)], [None]),
    (Mistral(), "[TOOL_CALLS][]", "", [], []),
    (Mistral(), "[TOOL_CALLS]", "", [], [None]),
    (
        Mistral(),
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "][TOOL_CALLS]["}, "id": "123456789"}]',
        "",
        [add(a=1, b="][TOOL_CALLS][")],
        [],
    ),
    (Mistral(), f"[TOOL_CALLS]add(1)[TOOL_CALLS][{JSON_CALL}]", "", [add(a=1)], [None]),
    (Mistral(), f"[{JSON_CALL}]", f"[{JSON_CALL}]", [], []),
    (MistralArgs(), '[TOOL_CALLS]add[ARGS]{"a": 1}', "", [add(a=1)], []),
    (MistralArgs(), '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]now.utc-2[ARGS]{}', "", [add(a=1), now()], []),
    (MistralArgs(), '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}', "", [add(a=1)], []),
    (MistralArgs(), f"[TOOL_CALLS][{JSON_CALL}]", "", [add(a=1)], []),
    (MistralArgs(), 'Hi.[TOOL_CALLS]add[ARGS]{"a": 1} Bye.', "Hi. Bye.", [add(a=1)], []),
    (MistralArgs(), '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "[TOOL_CALLS]"}', "", [add(a=1, b="[TOOL_CALLS]")], []),
    (MistralArgs(), '[TOOL_CALLS]add[ARGS]{"a": ', "", [], ["add"]),
    (MistralArgs(), "[TOOL_CALLS]add", "", [], ["add"]),
    (MistralArgs(), "[TOOL_CALLS]sub[ARGS]{}", "", [], ["sub"]),
    (MistralArgs(), "[TOOL_CALLS]add[ARGS]{}", "", [], ["add"]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls", "invalid"), CASES, ids=range(len(CASES)))
def test_what_is_read(form: ToolFormat, text: str, content: str, calls: list[ToolCall], invalid: list[str | None]):
    assert outcome(form.parse(text, TOOLS)) == (content, calls, invalid)


def xml(name: str, *parameters: str) -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def given_as(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize(
    ("text", "content", "calls", "invalid"),
    [
        (xml("add", given_as("a", "1"), given_as("b", "2")), "", [add(a=1, b="2")], []),
        (xml("add", given_as("a", "1"), given_as("c", "2")), "", [add(a=1, c=2)], []),
        (xml("add", given_as("a", "1"), given_as("c", "[2]")), "", [add(a=1, c="[2]")], []),
        (xml("add", given_as("a", "one")), "", [add(a="one")], []),
        (xml("add", given_as("a", "1"), given_as("new", '{"x": [2]}')), "", [add(a=1, new={"x": [2]})], []),
        (xml("add", given_as("a", "1"), given_as("b", "\n x\n\ny \n")), "", [add(a=1, b="\n x\n\ny \n")], []),
        (
            xml("add", given_as("a", "1"), given_as("b", "</tool_call>\n</parameter>\n<tool_call>")),
            "",
            [add(a=1, b="</tool_call>\n</parameter>\n<tool_call>")],
            [],
        ),
        ("<tool_call><function=add><parameter=a>1</parameter></function></tool_call>", "", [add(a=1)], []),
        (
            xml("add", given_as("a", "1"), given_as("b", "</parameter></function>\n</tool_call><parameter=c>")),
            "",
            [add(a=1, b="</parameter></function>\n</tool_call><parameter=c>")],
            [],
        ),
        (f"Hi.\n{xml('now.utc-2')}\nBye.", "Hi.\n\nBye.", [now()], []),
        (xml("now.utc-2") + "\n" + xml("add", given_as("a", "1")), "", [now(), add(a=1)], []),
        (xml("now.utc-2").removesuffix("\n</tool_call>"), "", [now()], []),
        (xml("now.utc-2").removesuffix("</function>\n</tool_call>"), "", [], ["now.utc-2"]),
        (xml("add", given_as("a", "1"))[:50], "", [], ["add"]),
        (xml("sub"), "", [], ["sub"]),
        (xml("add"), "", [], ["add"]),
        (f"<tool_call>\n{JSON_CALL}\n</tool_call>", "", [add(a=1)], []),
        (f"<tool_call>add(1)</tool_call>{xml('now.utc-2')}", "", [now()], [None]),
        ("<tool_call>add(1)", "", [], [None]),
        ("Write <function=add>.", "Write <function=add>.", [], []),
    ],
)
def test_what_is_read_of_tags(text: str, content: str, calls: list[ToolCall], invalid: list[str | None]):
    assert outcome(QwenXML().parse(text, TOOLS)) == (content, calls, invalid)


def test_a_text_that_may_be_none_is_read_by_its_types():
    schema = {
        "$defs": {"note": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "type": "object",
        "properties": {"note": {"$ref": "#/$defs/note"}, "unit": {"enum": ["5", "6"]}},
    }
    tools = tools_of([{"name": "write", "parameters": schema}])
    for value, text in {"5": "5", "x": "x", None: "null"}.items():
        call = ToolCall(name="write", arguments={"note": value, "unit": "5"})
        written = xml("write", given_as("note", text), given_as("unit", "5"))
        assert QwenXML().spell([call]) == written
        assert QwenXML().parse(written, tools).calls == (call,)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>{"name": "sub"}</tool_call>', "no tool 'sub', only add, now.utc-2"),
        ('<tool_call>{"name": "add"}</tool_call>', "lack a"),
        ('<tool_call>{"name": "add", "arguments": 7}</tool_call>', "no JSON object"),
        ("<tool_call>{7}</tool_call>", "no JSON"),
        ('<tool_call>{"name": "add", ', "cut short"),
    ],
)
def test_what_is_no_call_says_why_and_keeps_its_text(text: str, error: str):
    (invalid,) = Hermes().parse(text, TOOLS).invalid
    assert error in invalid.error
    assert invalid.text == text.removeprefix("<tool_call>").removesuffix("</tool_call>").strip()


# Writing

HOSTILE = [
    *['"', "\\", "{", "}", "[", "]", "\n", "é世", " ", "x", "; ", "```", "<|python_tag|>"],
    *["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "</parameter>", "</function>"],
]
texts = st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(HOSTILE)).map("".join)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
calls_of_anything = st.lists(
    st.builds(ToolCall, name=st.sampled_from(["f", "g.h:i/j-k"]), arguments=st.dictionaries(texts, values, max_size=3)),
    min_size=1,
    max_size=3,
)
ANYTHING = tools_of([{"name": "f"}, {"name": "g.h:i/j-k"}])


@pytest.mark.parametrize("form", FORMATS[:-1], ids=lambda form: form.name)
@settings(deadline=None)
@given(calls=calls_of_anything, before=st.sampled_from(["", "Well.\n"]))
def test_calls_are_read_as_they_are_spelled(form: ToolFormat, calls: list[ToolCall], before: str):
    before = "" if form.name == "llama3" else before  # an answer is a call as a whole
    parsed = form.parse(before + form.spell(calls), ANYTHING)
    assert list(parsed.calls) == calls
    assert parsed.content == before.strip()
    assert parsed.invalid == ()


@settings(deadline=None)
@given(
    arguments=st.lists(
        st.fixed_dictionaries(
            {}, optional={"text": texts, "count": st.integers(), "any": values.filter(lambda v: not isinstance(v, str))}
        ),
        min_size=1,
        max_size=3,
    )
)
def test_tags_are_read_as_they_are_spelled(arguments: list[dict[str, Any]]):
    schema = {"properties": {"text": {"type": "string"}, "count": {"type": "integer"}, "any": {}}}
    tools = tools_of([{"name": "f", "parameters": schema}])
    calls = [ToolCall(name="f", arguments=each) for each in arguments]
    text = QwenXML().spell(calls)
    inner = [line for each in arguments for line in str(each.get("text", "")).split("\n")]
    assume("</parameter>" not in inner)  # on a line of its own it cannot be told from the end of the value
    parsed = QwenXML().parse(text, tools)
    assert list(parsed.calls) == calls
    assert (parsed.content, parsed.invalid) == ("", ())


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@settings(deadline=None)
@given(calls=calls_of_anything, cut=st.integers(0, 10_000), soup=texts)
def test_whatever_is_cut_or_mixed_up_is_read_without_an_error(form: ToolFormat, calls, cut: int, soup: str):
    text = form.spell(calls)
    for broken in (text[: cut % (len(text) + 1)], soup, soup + text, text + soup, text[cut % (len(text) + 1) :]):
        parsed = form.parse(broken, ANYTHING)
        assert all(call.name in {"f", "g.h:i/j-k"} for call in parsed.calls)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@given(cut=st.integers(1, 10_000))
def test_no_call_that_is_cut_short_counts(form: ToolFormat, cut: int):
    calls = [add(a=12345), add(a=6789, b="text")]
    text = form.spell(calls)
    parsed = form.parse(text[: cut % len(text)], TOOLS)
    assert list(parsed.calls) == calls[: len(parsed.calls)]
