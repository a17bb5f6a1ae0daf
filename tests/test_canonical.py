"""Values that mean the same under a schema have one spelling, others have not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rksc_agents.model.canonical import canonical
from rksc_agents.model.tools import canonical_calls, tools_of
from rksc_agents.types import ToolCall

INTEGER, NUMBER, TEXT = {"type": "integer"}, {"type": "number"}, {"type": "string"}
MAYBE = {"anyOf": [INTEGER, {"type": "null"}]}
POINT = {
    "type": "object",
    "properties": {"x": NUMBER, "y": {"type": "number", "default": 0}, "unit": {"type": "string", "default": "m"}},
    "required": ["x"],
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "size": {"type": "integer", "default": 1},
                "left": {"$ref": "#/$defs/node"},
                "right": {"$ref": "#/$defs/node"},
            },
        }
    },
    "$ref": "#/$defs/node",
}


def of_property(schema: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": schema}, "$defs": definitions}


@pytest.mark.parametrize(
    ("value", "schema", "text"),
    [
        ({"b": 1, "a": [True, None]}, None, '{"a": [true, null], "b": 1}'),
        (5.0, None, "5"),
        (-0.0, None, "0"),
        (5.5, None, "5.5"),
        (1e23, None, "1" + "0" * 23),
        (2**53 + 1, None, "9007199254740993"),
        (" é\n", None, '"é"'),
        ({"k": [" x "]}, None, '{"k": ["x"]}'),
        ("5", None, '"5"'),
        ("5", INTEGER, "5"),
        (" +5.0 ", INTEGER, "5"),
        ("-.5e1", NUMBER, "-5"),
        ("0.10", NUMBER, "0.1"),
        ("five", INTEGER, '"five"'),
        ("1_000", INTEGER, '"1_000"'),
        ("٣", INTEGER, '"٣"'),
        ("", INTEGER, '""'),
        ("1e999", NUMBER, '"1e999"'),
        ("9" * 5000, INTEGER, f'"{"9" * 5000}"'),
        (5, TEXT, '"5"'),
        (5.0, TEXT, '"5"'),
        (True, TEXT, "true"),
        (True, INTEGER, "true"),
        ("5", {"type": ["integer", "string"]}, '"5"'),
        (5, {"type": ["integer", "string"]}, "5"),
        ("5", MAYBE, "5"),
        (None, MAYBE, "null"),
        (5, {"anyOf": [TEXT, {"type": "null"}]}, '"5"'),
        ("5", {"oneOf": [NUMBER, TEXT]}, '"5"'),
        ("5", {"enum": [4, 5]}, "5"),
        (5, {"enum": ["4", "5"]}, '"5"'),
        (5, {"const": "5"}, '"5"'),
        ("5", {"allOf": [INTEGER, {"minimum": 1}]}, "5"),
        (["1", 2.0], {"type": "array", "items": INTEGER}, "[1, 2]"),
        ({"p": "5"}, of_property({"$ref": "#/$defs/n"}, n=INTEGER), '{"p": 5}'),
        ({"p": "5"}, of_property({"$ref": "#/$defs/a~1b"}, **{"a/b": INTEGER}), '{"p": 5}'),
        ({"p": "5"}, of_property({"$ref": "#/$defs/none"}), '{"p": "5"}'),
        ({"x": "1"}, POINT, '{"unit": "m", "x": 1, "y": 0}'),
        ({}, of_property({"$ref": "#/$defs/n", "default": "3"}, n=INTEGER), '{"p": 3}'),
        ({}, of_property({"$ref": "#/$defs/n"}, n={"type": "integer", "default": 3}), '{"p": 3}'),
        ({}, of_property({"anyOf": [TEXT, {"type": "null"}], "default": None}), '{"p": null}'),
        ({"k": "5"}, {"type": "object", "additionalProperties": INTEGER}, '{"k": 5}'),
        ({"k": {"x": 1}}, {"properties": {"k": {"allOf": [POINT]}}}, '{"k": {"unit": "m", "x": 1, "y": 0}}'),
        ({"left": {}}, TREE, '{"left": {"size": 1}, "size": 1}'),
        ({"p": 5}, {"properties": {"p": True}}, '{"p": 5}'),
        ([1, [2.0]], {"type": "array", "items": False}, "[1, [2]]"),
    ],
    ids=range(46),
)
def test_the_one_spelling(value: Any, schema: dict[str, Any] | None, text: str):
    assert canonical(value, schema) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"kind": "a", "n": "1"}, '{"kind": "a", "n": 1}'),
        ({"kind": "b", "n": 1}, '{"kind": "b", "n": "1", "s": "x"}'),
    ],
)
def test_the_branch_that_requires_what_is_there_is_taken(value: Any, text: str):
    one = {"type": "object", "properties": {"kind": TEXT, "n": INTEGER}, "required": ["kind", "n"]}
    two = {"type": "object", "properties": {"n": TEXT, "s": {"default": "x"}}, "required": ["b"]}
    three = {"type": "object", "properties": {"kind": {"const": "b"}, "n": TEXT, "s": {"default": "x"}}}
    schema = {"anyOf": [two, one, three]} if value["kind"] == "a" else {"anyOf": [two, three, one]}
    assert canonical(value, schema) == text


def test_what_is_no_number_is_its_name():
    assert [canonical(value) for value in (float("nan"), float("inf"), -float("inf"))] == ['"nan"', '"inf"', '"-inf"']
    assert canonical(float("nan")) == canonical(float("nan"))


def test_a_default_that_branches_out_for_ever_is_left_alone_at_some_depth():
    schema = {"$defs": {"n": {"properties": {name: {"$ref": "#/$defs/n", "default": {}} for name in "abc"}}}}
    assert canonical({}, {**schema, "$ref": "#/$defs/n"}) == canonical(
        {"a": {}, "c": {}}, {**schema, "$ref": "#/$defs/n"}
    )
    assert canonical({"a": 1}, {"$ref": "#"}) == '{"a": 1}'


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def respelled(value: Any, rng: random.Random) -> Any:
    """The same value in other words: keys in another order, whole numbers as floats, white space around texts."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: respelled(value[key], rng) for key in keys}
    if isinstance(value, list):
        return [respelled(item, rng) for item in value]
    if isinstance(value, str):
        return f"\t{value} "
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    return value


@given(value=json_values, seed=st.integers(0, 99))
def test_one_meaning_has_one_spelling(value: Any, seed: int):
    text = canonical(value)
    assert canonical(respelled(value, random.Random(seed))) == text
    assert canonical(json.loads(text)) == text


def stripped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: stripped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [stripped(item) for item in value]
    return value.strip() if isinstance(value, str) else value


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal, where true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


small = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, 0.5, "", "0", "1", " 1", "true", "null"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(a=small, b=small)
def test_two_meanings_have_two_spellings(a: Any, b: Any):
    assert (canonical(a) == canonical(b)) == same(stripped(a), stripped(b))


@given(value=st.fixed_dictionaries({"x": st.integers(-9, 9)}, optional={"y": st.sampled_from([0, 0.0, "0", 1, "1"])}))
def test_a_default_that_is_given_is_one_that_is_not(value: dict[str, Any]):
    given_as_default = float(value.get("y", 0)) == 0
    assert (canonical(value, POINT) == canonical({"x": value["x"]}, POINT)) == given_as_default


# Calls

TOOLS = tools_of([{"name": "move", "parameters": POINT}, {"name": "stop"}])


def move(**arguments: Any) -> ToolCall:
    return ToolCall(name="move", arguments=arguments)


def test_calls_are_spelled_with_their_tools_schema():
    text = canonical_calls([move(y=0.0, x="1")], TOOLS)
    assert text == '[{"arguments": {"unit": "m", "x": 1, "y": 0}, "name": "move"}]'
    assert canonical_calls([move(x=1)], TOOLS) == text
    assert canonical_calls([move(x=1, unit="cm")], TOOLS) != text
    assert canonical_calls([], TOOLS) == "[]"


def test_the_order_of_calls_does_not_matter_and_their_number_does():
    stop = ToolCall(name="stop", arguments={})
    one = canonical_calls([move(x=1), stop, move(x=2)], TOOLS)
    assert canonical_calls([stop, move(x=2.0), move(x="1")], TOOLS) == one
    assert [call["name"] for call in json.loads(one)] == ["move", "move", "stop"]
    assert canonical_calls([stop, stop], TOOLS) != canonical_calls([stop], TOOLS)


def test_a_tool_that_is_not_known_is_spelled_without_a_schema():
    call = ToolCall(name="other", arguments={"x": "1"})
    assert canonical_calls([call], TOOLS) == '[{"arguments": {"x": "1"}, "name": "other"}]'
