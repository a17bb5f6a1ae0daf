"""Grammars, and branches that follow them to a complete end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rksc_agents.errors import ConfigError, EngineError, UnsupportedModelError
from rksc_agents.model.closing import Closer
from rksc_agents.model.constraint import KEPT, RETRIES, Constraint, Grammars
from rksc_agents.model.grammar import Choice, Grammar, JSONSchema, Lark, Regex, after_thinking
from rksc_agents.model.json_schema import closed
from rksc_agents.model.loader import load_model
from rksc_agents.model.spelled import literals, most_growth
from rksc_agents.testing import scripted_tokenizer

TOKENIZER = scripted_tokenizer()
EOS = TOKENIZER.eos_token_id
GRAMMARS = Grammars(TOKENIZER, [EOS])
SIZE = len(TOKENIZER)

Draw = Callable[[NDArray[np.int64], int], int]
"""A model: of the tokens that are allowed, the one that it wants."""


def compiled(grammar: Grammar | str) -> Constraint:
    return GRAMMARS.compile(grammar if isinstance(grammar, str) else grammar.lark())


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text))


def fed(constraint: Constraint, text: str, left: int = 10**6) -> Constraint:
    """`constraint`, after a text that its grammar allows."""
    for token in ids(text):
        assert constraint.mask(SIZE)[token], text
        assert constraint.take(token, left) == token
    return constraint


def follows(grammar: Grammar | str, text: str) -> bool:
    """Whether `text` is a complete text of the grammar."""
    constraint = compiled(grammar)
    for token in ids(text):
        if not constraint.mask(SIZE)[token]:
            return False
        constraint.take(token, 10**6)
    return constraint.complete


def ended(constraint: Constraint) -> str:
    """The completion of a text, as text."""
    tokens = constraint.closing()
    assert tokens is not None
    return str(TOKENIZER.decode(tokens))


def at_random(seed: int) -> Draw:
    generator = np.random.default_rng(seed)
    return lambda allowed, _: int(generator.choice(allowed))


def never_closing(seed: int) -> Draw:
    """A model that closes nothing as long as anything else is allowed."""
    closers = {*ids('"}]'), EOS}
    generator = np.random.default_rng(seed)

    def draw(allowed: NDArray[np.int64], _: int) -> int:
        others = [token for token in allowed.tolist() if token not in closers]
        others = others or [token for token in allowed.tolist() if token != EOS] or [EOS]
        return int(generator.choice(others))

    return draw


def opening(seed: int) -> Draw:
    """A model that opens a bracket wherever one is allowed, and closes nothing as long as anything else is allowed."""
    brackets, otherwise = ids("[{"), never_closing(seed)
    generator = np.random.default_rng(seed)

    def draw(allowed: NDArray[np.int64], left: int) -> int:
        open_now = np.intersect1d(allowed, brackets)
        return int(generator.choice(open_now)) if len(open_now) else otherwise(allowed, left)

    return draw


def written(constraint: Constraint, most: int, draw: Draw, tokenizer: Any = TOKENIZER) -> str:
    """What a model writes in `most` tokens, by the contract between decoding and constraints."""
    tokens: list[int] = []
    for left in range(most, 0, -1):
        allowed = np.flatnonzero(constraint.mask(len(tokenizer)))
        token = constraint.take(draw(allowed, left), left)
        assert token in allowed
        if token == tokenizer.eos_token_id:
            assert constraint.done
            break
        tokens.append(token)
        if constraint.done:
            break
    assert constraint.complete
    return str(tokenizer.decode(tokens))


# -- schemas of all kinds ---------------------------------------------------------------------------

NAMES = ("a", "bb", "name", "value", "some_long_name", "x y", "ü", 'q"')
VALUES = ("red", "green", "re", "é\n", "", 1, 2.5, -3, None, True)
PATTERNS = ("^[a-f]+$", "^[0-9]{3}-[0-9]{2}$", "^(foo|bar)+!$", "^[a-z]+@[a-z]+\\.com$", '^\\\\[a-z]"$')
FORMATS = ("date-time", "date", "time", "uuid", "ipv4", "ipv6", "email", "duration", "hostname", "uri")


@st.composite
def integers(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    low = draw(st.none() | st.integers(-50, 2000))
    if low is not None:
        schema["minimum"] = low
    if draw(st.booleans()):
        schema["maximum"] = (low or 0) + draw(st.integers(0, 100))
    return schema


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    @st.composite
    def make(draw: st.DrawFn) -> dict[str, Any]:
        names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
        needed = [name for name in names if draw(st.booleans())]
        return {"type": "object", "properties": {name: draw(values) for name in names}, "required": needed}

    return make()


def arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda item, least, more: {"type": "array", "items": item, "minItems": least, "maxItems": least + more},
        items,
        st.integers(0, 3),
        st.integers(0, 3),
    )


LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    integers(),
    st.just({"type": "number"}),
    st.builds(lambda low: {"type": "number", "minimum": low / 100}, st.integers(-500, 500)),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 12),
        st.integers(0, 9),
    ),
    st.just({"type": "string"}),
    st.builds(lambda pattern: {"type": "string", "pattern": pattern}, st.sampled_from(PATTERNS)),
    st.builds(lambda name: {"type": "string", "format": name}, st.sampled_from(FORMATS)),
    st.builds(lambda values: {"enum": values}, st.lists(st.sampled_from(VALUES), min_size=1, max_size=4)),
    st.builds(lambda value: {"const": value}, st.sampled_from([*VALUES, [1, "z"], {"a": {"b": 1}}])),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "object"}]),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.builds(lambda ways: {"anyOf": ways}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda value: {"anyOf": [value, {"type": "null"}]}, inner),
    ),
    max_leaves=8,
)
CHECKED = jsonschema.Draft202012Validator


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(SCHEMAS, st.integers(0, 2**32), st.integers(0, 80), st.sampled_from([at_random, never_closing, opening]))
def test_json_is_complete_and_valid_whatever_the_model_wants(
    schema: dict[str, Any], seed: int, more: int, model: Callable[[int], Draw]
) -> None:
    constraint = compiled(JSONSchema(schema))
    least = constraint.closing()
    assert least is not None
    value = json.loads(written(constraint, len(least) + more, model(seed)))
    assert CHECKED(schema).is_valid(value)


NODE = {"$ref": "#/$defs/node"}
TREE = {
    "$defs": {
        "node": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": "add"}, "l": NODE, "r": NODE},
                    "required": ["kind", "l", "r"],
                },
                {
                    "type": "object",
                    "properties": {"kind": {"const": "leaf"}, "v": {"type": "integer"}},
                    "required": ["kind", "v"],
                },
            ]
        }
    },
    "$ref": "#/$defs/node",
}
CHAIN = {
    "$defs": {
        "link": {
            "type": "object",
            "properties": {"child": {"$ref": "#/$defs/link"}, "v": {"type": "integer"}},
            "required": ["v"],
        }
    },
    "$ref": "#/$defs/link",
}
LIST = {"type": "array", "minItems": 40, "items": {"type": "object", "properties": {"a": {}}, "required": ["a"]}}


@pytest.mark.parametrize("schema", [TREE, CHAIN, LIST, {"type": "string", "minLength": 150}, {}, {"type": "array"}])
@pytest.mark.parametrize("more", [0, 1, 7, 90])
@pytest.mark.parametrize("model", [at_random, never_closing, opening])
def test_recursion_and_long_lists_end_in_time(schema: dict[str, Any], more: int, model: Callable[[int], Draw]) -> None:
    constraint = compiled(JSONSchema(schema))
    least = constraint.closing()
    assert least is not None
    value = json.loads(written(constraint, len(least) + more, model(more)))
    assert CHECKED(schema).is_valid(value)


def test_definitions_that_are_used_many_times_leave_room_for_their_end() -> None:
    """One bracket makes 256 objects necessary here, in a schema that is short."""
    pairs = {
        f"d{depth}": {
            "type": "object",
            "properties": {side: {"$ref": f"#/$defs/d{depth - 1}"} for side in ("l", "r")},
            "required": ["l", "r"],
        }
        for depth in range(1, 9)
    }
    schema = {"$defs": {"d0": {"type": "object"}, **pairs}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/d8"}]}
    grammar = JSONSchema(schema)
    assert written(compiled(grammar), 2 * len(grammar.lark()) + 9, opening(0)) == "null"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("uuid", r"[\da-fA-F]{8}(-[\da-fA-F]{4}){3}-[\da-fA-F]{12}"),
        ("date", r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"),
        (
            "date-time",
            r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[tT ]([01]\d|2[0-3]):[0-5]\d:[0-6]\d(\.\d+)?"
            r"([zZ]|[+-]\d\d:\d\d)",
        ),
        ("ipv4", r"(\d{1,3}\.){3}\d{1,3}"),
        ("email", r".+@[^@]+"),
    ],
)
def test_texts_have_the_format_that_the_schema_names(name: str, form: str) -> None:
    constraint = compiled(JSONSchema({"type": "string", "format": name}))
    least = constraint.closing()
    assert least is not None
    for seed in range(20):
        value = json.loads(written(constraint.fork(), len(least) + seed, at_random(seed)))
        assert re.fullmatch(form, value)


@pytest.mark.parametrize(
    ("schema", "shortest"),
    [
        ({"type": "object"}, "{}"),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 3}, "[1, 1, 1]"),
        ({"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}, "{}"),
        (CHAIN, '{"v": 1}'),
        (TREE, '{"kind": "leaf", "v": 1}'),
        ({"anyOf": [{"type": "array", "minItems": 9}, {"type": "null"}]}, "null"),
        ({"type": "string", "minLength": 3}, '"111"'),
        ({"type": "string", "format": "date-time"}, '"1111-11-11T11:11:11Z"'),
    ],
)
def test_completions_are_short(schema: dict[str, Any], shortest: str) -> None:
    assert ended(compiled(JSONSchema(schema))) == shortest


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


EMAIL = {"type": "string", "format": "email"}
UUIDS = {
    "type": "object",
    "properties": {"many": {}, "ü": {"type": "string", "format": "ipv6"}, "id": {"type": "string", "format": "uuid"}},
    "required": ["id"],
}
RICH = of(
    a=of(n={"type": "integer", "minimum": 1174}),
    bb=of(kind={"enum": [None, "green"]}, text={"type": "string", "minLength": 2}),
)


@pytest.mark.parametrize(
    ("grammar", "most"),
    [
        (JSONSchema({"type": "array", "minItems": 2, "items": {"type": "array", "minItems": 1, "items": EMAIL}}), 18),
        (JSONSchema(of(a=EMAIL, b={"type": "number"}, c=EMAIL)), 35),
        (JSONSchema({"type": "array", "minItems": 2, "items": {"pattern": "^(foo|bar)+!$", "type": "string"}}), 16),
        (JSONSchema({"type": "array", "minItems": 5, "items": UUIDS}), 250),
        (JSONSchema({"type": "array", "minItems": 12, "items": RICH}), 750),
        (JSONSchema({"type": "array", "minItems": 60, "items": {"type": "array", "minItems": 1}}), 400),
        (JSONSchema({"type": "string", "format": "duration"}), 5),
        (Lark('start: /(?s:.*)/ <|tool|> "x"'), 2),
        (Regex(r"(?:[a-z ]+\. ){3}END"), 12),
        (Regex(r"[a-z]+ \(\d{3}\) [a-z]+"), 9),
        (Regex(r".+@.+\.com"), 7),
        (Lark('start: "<p>" value "</p>"\nvalue[lazy]: /(?s:.*)<\\/value>/'), 15),
    ],
)
def test_completions_that_are_hard_to_find_are_found(grammar: Grammar, most: int) -> None:
    tokens = compiled(grammar).closing()
    assert tokens is not None
    assert len(tokens) <= most


@pytest.mark.parametrize(
    ("begun", "end"),
    [
        ("", '{"text": "", "n": 1}'),
        ('{"text": "so', '", "n": 1}'),
        ('{"text": "so\\', '"", "n": 1}'),
        ('{"text": "so", "n": -', "1}"),
        ('{"text": "so", "n": 1.', "1}"),
        ('{"text": "so", "n": 12', "}"),
        ('{"text": "so", "n": 12}', ""),
    ],
)
def test_a_text_is_completed_from_anywhere(begun: str, end: str) -> None:
    schema = {"properties": {"text": {"type": "string"}, "n": {"type": "number"}}, "required": ["text", "n"]}
    constraint = fed(compiled(JSONSchema({"type": "object", **schema})), begun)
    assert ended(constraint) == end


# -- what a grammar is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "fits", "fails"),
    [
        (Choice("yes", "no", 'a\n"b\\ü'), ["yes", "no", 'a\n"b\\ü'], ["ye", "maybe", "yesno"]),
        (Choice("yes", "yes sir"), ["yes", "yes sir"], ["yes "]),
        (Regex(r"^\d{3}-\d{2}$"), ["123-45"], ["123-4", "12345", "١٢٣-٤٥"]),
        (Regex(r"[\d.]+"), ["1.5"], ["d", "١"]),
        (Regex(r"(?i)a/b\n"), ["a/b\n", "A/b\n"], ["a\\/b"]),
        (Choice("%json {}", "<[5]>", "// c", "\x01'"), ["%json {}", "<[5]>", "// c", "\x01'"], ["", "//"]),
        (Regex(r"[/\\]+|\"é\""), ["/\\/", '"é"'], ["", "é"]),
        (Regex("a\nb|(?s)c.d"), ["a\nb", "c\nd", "c/d"], ["ab", "a\\nb"]),
        (Lark('start: "(" NUMBER ")"\nNUMBER: /[0-9]+/'), ["(12)"], ["()", "(12"]),
    ],
)
def test_text_fits_or_not(grammar: Grammar, fits: list[str], fails: list[str]) -> None:
    assert [text for text in [*fits, *fails] if follows(grammar, text)] == fits


def test_json_has_one_form() -> None:
    """That of json.dumps: what was written comes back the same from a chat template."""
    grammar = JSONSchema({"type": "array", "items": {"type": ["string", "object"]}})
    for value in (['é\n\t"\\/'], [{"a": [1, {"b": None}]}, "x"]):
        assert follows(grammar, json.dumps(value, ensure_ascii=False))
    for text in ('["\\u00e9"]', '["\\u000a"]', '["\\/"]', '["a","b"]', '[ "a"]', '[{"a":1}]'):
        assert not follows(grammar, text)


def test_what_only_looks_like_what_cannot_be_enforced_is_taken() -> None:
    free = {"type": "object", "minProperties": 2, "properties": {"a": {}}, "required": ["a"]}
    grammar = JSONSchema({**free, "additionalProperties": True})
    assert follows(grammar, '{"a": 1, "b": 1}')
    assert not follows(grammar, '{"a": 1}')
    assert not follows(grammar, '{"a": 1, "a": 1}')
    names = {"const": {"type": "integer"}, "enum": {"type": "integer"}, "minProperties": {"type": "integer"}}
    assert follows(JSONSchema({"type": "object", "properties": names}), '{"const": 1, "enum": 1, "minProperties": 9}')
    assert follows(JSONSchema({"const": "\t\n\u2028\u0085"}), '"\\t\\n\u2028\u0085"')


class Point(BaseModel):
    x: int
    label: str | None = None


class Drawing(BaseModel):
    kind: Literal["drawing"] = "drawing"
    points: list[Point] = Field(max_length=2)


@pytest.mark.parametrize("seed", range(5))
def test_pydantic_models_read_what_follows_their_schema(seed: int) -> None:
    constraint = compiled(JSONSchema(Drawing))
    Drawing.model_validate_json(written(constraint, 150, at_random(seed)))


def test_objects_are_closed_where_they_declare_properties() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a": inner, "c": {"type": "object"}}}
    grammar = JSONSchema(schema)
    assert follows(grammar, '{"a": {"b": 1}, "c": {"any": 1}}')
    assert not follows(grammar, '{"d": 1}')
    assert not follows(grammar, '{"a": {"d": 1}}')
    assert follows(JSONSchema({**schema, "additionalProperties": True}), '{"d": 1}')
    assert "additionalProperties" not in schema
    assert "additionalProperties" not in inner


def test_properties_that_values_happen_to_have_are_no_schema() -> None:
    schema = {"enum": [{"properties": {"a": 1}}], "properties": {"properties": {"type": "integer"}}}
    assert closed(schema) == {**schema, "additionalProperties": False}


PARTS: dict[str, Any] = {
    "all of": {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {}}}]},
    "all of, beside properties": {
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "allOf": [{"properties": {"b": {}}}],
    },
    "any of, beside properties": {
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "anyOf": [{"properties": {"b": {}}, "required": ["b"]}, {"required": ["a"]}],
    },
    "a reference, beside properties": {
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "$ref": "#/$defs/more/0~1",
        "$defs": {"more": {"0/": {"type": "object", "properties": {"b": {}}}}},
    },
    "all of references": {
        "allOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}],
        "$defs": {
            "one": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            "two": {"type": "object", "properties": {"b": {}}},
        },
    },
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_one_object_are_closed_together(name: str) -> None:
    grammar = JSONSchema({"type": "object", **PARTS[name]})
    assert follows(grammar, '{"a": 1, "b": 2}')
    assert not follows(grammar, '{"a": 1, "c": 2}')
    assert not follows(grammar, '{"a": "x", "b": 2}')


@pytest.mark.parametrize("reference", ["#/$defs/none", "http://127.0.0.1/schema", 3])
def test_references_that_lead_nowhere_are_refused(reference: Any) -> None:
    besides: list[dict[str, Any]] = [{}, {"properties": {"a": {}}}]
    for beside in besides:
        with pytest.raises(ConfigError, match="cannot be enforced"):
            compiled(JSONSchema({"$ref": reference, **beside}))


def test_a_reference_into_itself_is_written_out_once() -> None:
    schema = {"$defs": {"a": {"properties": {"x": {}}, "allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}
    assert closed({**schema, "properties": {"y": {}}})["additionalProperties"] is False


def test_the_user_cannot_change_a_grammar_later() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {}}}
    grammar = JSONSchema(schema)
    before = grammar.key
    schema["properties"]["b"] = {}
    assert grammar.key == before
    assert JSONSchema(schema) != grammar
    with pytest.raises(AttributeError):
        grammar.schema = {}  # type: ignore[misc]


def test_equal_grammars_are_equal() -> None:
    assert JSONSchema({"type": "object"}) == JSONSchema({"type": "object"})
    assert len({Choice("a", "b"), Choice("a", "b"), Choice("b", "a"), Regex("a"), Regex("a"), Lark("start: /a/")}) == 4
    assert Choice("a") != Lark(Choice("a").lark())
    assert Choice("a") != "a"


def test_instructions_say_what_to_write() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    text = JSONSchema(schema).instruction
    assert text.startswith("Answer with a JSON object that fits this JSON schema:\n{")
    assert json.loads(text.partition("\n")[2]) == schema
    assert JSONSchema({"type": "array"}).instruction.startswith("Answer with JSON that fits")
    assert JSONSchema({"type": "object"}).instruction == "Answer with a JSON object."
    assert JSONSchema({}).instruction == "Answer with JSON."
    assert Choice("a", "b").instruction == "Answer with one of: a, b"
    assert Regex("a").instruction is None
    assert Lark('start: "a"').instruction is None


class Unwritable(BaseModel):
    call: Callable[[], int]


@pytest.mark.parametrize(
    ("make", "arguments", "told"),
    [
        (JSONSchema, ["{}"], "as a mapping"),
        (JSONSchema, [True], "as a mapping"),
        (JSONSchema, [int], "as a mapping"),
        (JSONSchema, [{"const": {1, 2}}], "is no JSON"),
        (JSONSchema, [{"const": float("nan")}], "is no JSON"),
        (JSONSchema, [Unwritable], "pydantic has no JSON schema"),
        (lambda schema: JSONSchema(schema).lark(), [{"x-guidance": {}}], "leave it out"),
        (Regex, [""], "not empty"),
        (Regex, [3], "as a text"),
        (Regex, ["[a"], "unclosed character class"),
        (Regex, [r"(a)\1"], "backreferences"),
        (Regex, ["(?=a)b"], "look-ahead"),
        (Choice, [], "at least one"),
        (Choice, ["a", ""], "none of them empty"),
        (Choice, ["a", 3], "at least one text"),
        (Choice, ["a", "b", "a"], "each text once"),
        (Lark, ['x: "a"'], 'a rule "start"'),
        (Lark, [""], 'a rule "start"'),
        (Lark, [None], 'a rule "start"'),
        (after_thinking, ['start: "a"', []], "at least one text or token id"),
        (after_thinking, ['start: "a"', [""]], "at least one text or token id"),
        (after_thinking, ['start: "a"', [-1]], "at least one text or token id"),
        (after_thinking, ['start: "a"', [True]], "at least one text or token id"),
    ],
)
def test_malformed_grammars_are_refused_at_once(make: Callable[..., object], arguments: list[Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        make(*arguments)


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (JSONSchema({"not": {"type": "null"}}), "uses not, which cannot be enforced"),
        (JSONSchema({"type": "array", "uniqueItems": True}), "uses uniqueItems, which cannot be enforced"),
        (JSONSchema({"if": {}, "then": {}}), "uses if, then, which cannot"),
        (JSONSchema({"type": "string", "format": "isbn"}), "format 'isbn', which is not known"),
        (JSONSchema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), 'use "anyOf"'),
        (JSONSchema({"type": "string", "pattern": "(?!a)b"}), "look-ahead and look-behind, is not supported; change"),
        (JSONSchema({"type": "object", "minProperties": 2}), '"minProperties": 2, and a name'),
        (
            JSONSchema({"anyOf": [{"minProperties": 3, "properties": {"a": {}}, "required": ["a"]}]}),
            "twice: at most 2 can",
        ),
        (JSONSchema({"const": "a\x01b"}), "\"const\" with 'a\\x01b'"),
        (JSONSchema({"type": "array", "items": {"enum": [1, {"k": ["\x7f"]}]}}), "\"enum\" with '\\x7f'"),
        (JSONSchema({"type": "text"}), "Invalid type: text; change"),
        (JSONSchema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum (3) is greater"),
        (JSONSchema({"type": "object", "properties": {"a": {}}, "required": ["b"]}), "required property 'b'"),
        (Lark("start: missing"), 'unknown name: "missing"; change'),
        (Lark("start: <nothing>"), "unknown special token"),
    ],
)
def test_what_cannot_be_enforced_is_refused(grammar: Grammar, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        compiled(grammar)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "{}", "", "\x00"])
def test_malformed_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the grammar cannot be enforced"):
        GRAMMARS.compile(text)


# -- behind thinking --------------------------------------------------------------------------------

TOOL = TOKENIZER.get_vocab()["<|tool|>"]


@pytest.mark.parametrize(
    ("closings", "text", "fits"),
    [
        (["</think>", "[/T]\n"], "I think so.</think>\n\nyes", True),
        (["</think>", "[/T]\n"], "I think so.[/T]\nno", True),
        (["</think>", "[/T]\n"], "</think>no", True),
        (["</think>", "[/T]\n"], "yes", False),
        (["</think>", "[/T]\n"], "no</think>maybe", False),
        (["</think>"], "a</think>b</think>yes", False),
        ([TOOL], "a < b<|tool|> yes", True),
        ([TOOL], "<|tool|>yes", True),
        ([TOOL], "yes", False),
        ([TOOL, "</think>"], "a</think>yes", True),
        ([TOOL, "</think>"], "a<|tool|>no", True),
    ],
)
def test_a_grammar_behind_thinking(closings: list[str | int], text: str, fits: bool) -> None:
    assert follows(after_thinking(Choice("yes", "no").lark(), closings), text) is fits


@pytest.mark.parametrize("closings", [["</think>"], ["[/THINK]", "</reasoning>"], [TOOL], [TOOL, "</think>"]])
@pytest.mark.parametrize("grammar", [JSONSchema(CHAIN), Regex("[ab]+c"), Lark('start: "x" other\nother: /y+/')])
def test_thinking_ends_in_time(closings: list[str | int], grammar: Grammar) -> None:
    constraint = compiled(after_thinking(grammar.lark(), closings))
    least = constraint.closing()
    assert least is not None
    assert len(least) < 30
    for more in (0, 3, 40):
        text = written(constraint.fork(), len(least) + more, never_closing(more))
        ends = [re.escape(str(TOKENIZER.decode([end])) if isinstance(end, int) else end) for end in closings]
        answer = re.split("|".join(ends), text, maxsplit=1)[1]
        assert follows(grammar, answer.lstrip())


# -- where a branch stands --------------------------------------------------------------------------


def test_end_of_text_is_allowed_exactly_where_the_text_is_complete() -> None:
    constraint = compiled(Choice("a", "abc"))
    seen = []
    for token in ids("abc"):
        seen.append((constraint.complete, bool(constraint.mask(SIZE)[EOS]), constraint.done))
        constraint.take(token, 9)
    assert seen == [(False, False, False), (True, True, False), (False, False, False)]
    assert np.flatnonzero(constraint.mask(SIZE)).tolist() == [EOS]
    assert constraint.done


def test_every_token_that_ends_a_text_is_allowed() -> None:
    tool = TOKENIZER.get_vocab()["<|tool|>"]
    for end in (EOS, tool):
        constraint = Grammars(TOKENIZER, [EOS, tool]).compile(Choice("a").lark())
        constraint.take(ids("a")[0], 3)
        assert np.flatnonzero(constraint.mask(SIZE)).tolist() == sorted([EOS, tool])
        assert constraint.take(end, 2) == end


def test_after_the_end_nothing_but_the_end_is_allowed() -> None:
    constraint = compiled(Regex("a+"))
    constraint.take(ids("a")[0], 9)
    assert constraint.take(EOS, 8) == EOS
    assert constraint.done
    assert constraint.complete
    assert constraint.closing() == []
    assert np.flatnonzero(constraint.mask(SIZE)).tolist() == [EOS]
    with pytest.raises(EngineError, match="not allowed here"):
        constraint.take(ids("a")[0], 7)
    assert constraint.fork().done


@pytest.mark.parametrize("token", [EOS, ids("x")[0], SIZE, 2**40, -1])
def test_tokens_that_the_grammar_forbids_are_refused(token: int) -> None:
    constraint = compiled(Choice("abc"))
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(EngineError, match=f"token {token} is not allowed here"):
            constraint.take(token, 9)
    assert fed(constraint, "abc").done


def test_the_models_vocabulary_may_differ_from_the_tokenizers() -> None:
    constraint = Grammars(TOKENIZER, [EOS, SIZE + 50]).compile(Lark("start: /(?s:.*)/").lark())
    assert constraint.mask(SIZE + 100).shape == (SIZE + 100,)
    assert np.flatnonzero(constraint.mask(SIZE + 100)[SIZE:]).tolist() == [50]
    assert constraint.mask(40).tolist() == constraint.mask(SIZE)[:40].tolist()
    assert constraint.take(SIZE + 50, 5) == SIZE + 50


def test_forks_are_independent() -> None:
    parent = fed(compiled(Choice("abc", "abd")), "ab")
    one, two = parent.fork(), parent.fork()
    assert fed(one, "c").done
    assert fed(two, "d").done
    assert not parent.complete
    assert np.flatnonzero(parent.mask(SIZE)).tolist() == ids("cd")


def test_a_token_that_leaves_no_room_gives_way_to_the_shortest_end() -> None:
    constraint = fed(compiled(JSONSchema({"type": "string"})), '"aa', left=10)
    assert constraint.take(ids("b")[0], 2) == ids("b")[0]
    assert constraint.take(ids("b")[0], 1) == ids('"')[0]
    assert constraint.done


def test_a_complete_text_ends_where_more_could_not_be_completed() -> None:
    constraint = fed(compiled(Regex("a(bcd)?")), "a", left=9)
    assert constraint.fork().take(ids("b")[0], 3) == ids("b")[0]
    assert constraint.take(ids("b")[0], 2) == EOS
    assert constraint.done


def test_where_nothing_fits_the_model_has_its_way() -> None:
    constraint = compiled(Choice("abcdef"))
    assert [constraint.take(token, left) for token, left in zip(ids("abc"), (3, 2, 1), strict=True)] == ids("abc")
    assert not constraint.complete


def test_the_shortest_end_is_not_forced_where_another_fits_as_well() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["up", "no"]}}, "required": ["a"]}
    constraint = compiled(JSONSchema(schema))
    least = constraint.closing()
    assert least is not None
    for choice in ("up", "no"):
        assert written(constraint.fork(), len(least), wanting(f'{{"a": "{choice}"}}')) == f'{{"a": "{choice}"}}'


def wanting(text: str) -> Draw:
    """A model that writes `text`."""
    rest = iter(ids(text))
    return lambda allowed, _: next(rest)


def test_with_room_to_spare_no_completion_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    search = Closer.closing

    def counted(closer: Closer, matcher: Any) -> list[int] | None:
        looked.append(1)
        return search(closer, matcher)

    monkeypatch.setattr(Closer, "closing", counted)
    grammar = JSONSchema({"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}})
    constraint = compiled(grammar)
    looked.clear()
    text = "[[true], [false, true]"
    fed(constraint.fork(), text)
    assert looked == []
    fed(constraint.fork(), text, left=30)
    assert 0 < len(looked) < len(text)


@pytest.mark.parametrize("model", [at_random, never_closing])
def test_room_that_runs_out_slowly_is_noticed_in_time(model: Callable[[int], Draw]) -> None:
    """From far beyond the bound below which completions are looked for, down to nothing."""
    schema = {"type": "array", "items": {"type": "array", "minItems": 2, "items": {"type": "string"}}}
    grammar = JSONSchema(schema)
    value = json.loads(written(compiled(grammar), 8 * most_growth(grammar.lark()), model(3)))
    assert CHECKED(schema).is_valid(value)


def test_a_grammar_that_no_completion_is_found_for_is_followed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(Closer, "closing", lambda *_: looked.append(1))
    constraint = Grammars(TOKENIZER, [EOS]).compile('start: /a+/ "b"')
    assert constraint.closing() is None
    looked.clear()
    for left in range(2 * RETRIES, 0, -1):
        assert constraint.take(ids("a")[0], left) == ids("a")[0]
    assert len(looked) < 8  # it is not looked for again at every token
    assert fed(constraint, "b").done


def test_a_grammar_with_no_short_end_is_followed_all_the_same() -> None:
    constraint = compiled(Regex("[0-9]{1500}"))
    assert constraint.closing() is None
    short = constraint.fork()
    assert [short.take(token, left) for token, left in zip(ids("121"), (3, 2, 1), strict=True)] == ids("121")
    assert not short.complete
    assert not fed(constraint, "7" * (RETRIES + 2), left=100).complete
    assert np.flatnonzero(constraint.mask(SIZE)).tolist() == sorted(ids("0123456789"))


def test_a_grammar_that_cannot_be_followed_any_further_is_an_error() -> None:
    constraint = compiled(Lark("start: /(?s:.*)/"))
    matcher = constraint._matcher
    assert matcher.consume_token(10**6) is False  # as after a limit of its own
    with pytest.raises(EngineError, match=r"cannot be followed any further: .*make it simpler"):
        constraint.mask(SIZE)
    assert not constraint.complete


# -- compiling --------------------------------------------------------------------------------------


def test_a_text_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_texts: list[str] = []
    grammars = Grammars(TOKENIZER, [EOS])
    monkeypatch.setattr(Closer, "__init__", noted(compiled_texts))
    text = Choice("a").lark()
    first = grammars.compile(text)
    first.take(ids("a")[0], 5)
    assert not grammars.compile(text).complete
    assert compiled_texts == [text]
    for number in range(KEPT):
        grammars.compile(Choice(f"b{number}").lark())
    grammars.compile(Choice("b0").lark())
    assert len(compiled_texts) == KEPT + 1
    for again in (text, Choice("b0").lark()):  # the second was used a moment ago, so it stayed
        grammars.compile(again)
        assert compiled_texts[KEPT + 1 :] == [text]


def noted(texts: list[str]) -> Callable[..., None]:
    make = Closer.__init__

    def init(closer: Closer, tokenizer: Any, vocabulary: Any, lark: str) -> None:
        texts.append(lark)
        time.sleep(0.005)  # long enough for another thread to ask for the same
        make(closer, tokenizer, vocabulary, lark)

    return init


def test_threads_share_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(Closer, "__init__", noted(texts))
    grammars = Grammars(TOKENIZER, [EOS])
    schemas: list[dict[str, Any]] = [CHAIN, TREE, {"type": "integer", "minimum": 7}, {"type": "object"}]

    def work(number: int) -> bool:
        schema = schemas[number % len(schemas)]
        value = json.loads(written(grammars.compile(JSONSchema(schema).lark()), 60, at_random(number)))
        return CHECKED(schema).is_valid(value)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(64)))
    assert len(texts) == len(schemas)


def test_a_refused_text_does_not_stay() -> None:
    for _ in range(2):
        with pytest.raises(ConfigError):
            GRAMMARS.compile("start: missing")
    assert fed(compiled(Choice("ok")), "ok").done


class Slow:
    """A tokenizer without a fast form."""

    def __len__(self) -> int:
        return 10


def test_tokenizers_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"need a fast tokenizer, and this model's is a Slow: load one"):
        Grammars(Slow(), [1]).compile('start: "a"')  # type: ignore[arg-type]
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    with pytest.raises(UnsupportedModelError, match="with this model's tokenizer"):
        Grammars(PreTrainedTokenizerFast(tokenizer_object=words), [1]).compile('start: "a"')
    for eos in ([], [SIZE + 3]):
        with pytest.raises(UnsupportedModelError, match="has no end-of-text token"):
            Grammars(TOKENIZER, eos).compile('start: "a"')


def test_grammars_load_llguidance_only_when_needed() -> None:
    code = "import sys, rksc_agents.model.constraint; print('llguidance' in sys.modules)"
    out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_several_grammars_in_json_are_taken_too() -> None:
    parts = [
        {"name": "x", "lark_grammar": Choice("yes").lark()},
        {"name": "y", "lark_grammar": JSONSchema(CHAIN).lark()},
    ]
    text = json.dumps({"grammars": [{"lark_grammar": "start: @x | @y"}, *parts]})
    assert follows(text, "yes")
    assert follows(text, '{"v": 3}')
    assert not follows(text, "no")


@pytest.mark.parametrize(
    ("lark", "found"),
    [
        ('start: "a\\nb" | x\nx: %json {"const": "c"}\n', ["a\nb"]),
        (r"start: /(?s:.*)<\/think>[a-z]{3}\d\[end\]/", ["</think>", "[end]"]),
        ('start: "a" // %json is not used\n', ["a"]),
        (json.dumps({"grammars": [{"lark_grammar": 'start: "ab"'}, {"json_schema": {"const": "c"}}]}), ["ab"]),
    ],
)
def test_literals_are_what_a_grammar_spells_out(lark: str, found: list[str]) -> None:
    assert literals(lark) == found


# -- a real tokenizer -------------------------------------------------------------------------------


@pytest.mark.real
def test_a_real_vocabulary_ends_in_time() -> None:
    tokenizer = load_model().tokenizer
    grammars = Grammars(tokenizer, [tokenizer.eos_token_id])
    assert tokenizer.decode(grammars.compile(Regex("[a-z]+!").lark()).closing() or []) == "a!"
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 30},
            "mail": {"type": "string", "format": "email"},
            "id": {"type": "string", "format": "uuid"},
            "points": {"type": "array", "minItems": 2, "items": {"type": "number"}},
            "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        },
        "required": ["name", "mail", "id", "points"],
    }
    constraint = grammars.compile(JSONSchema(schema).lark())
    least = constraint.closing()
    assert least is not None
    closers = {token for token in range(len(tokenizer)) if set('"]}') & set(tokenizer.decode([token]))}

    def closing_nothing(allowed: NDArray[np.int64], left: int) -> int:
        others = [token for token in allowed.tolist() if token not in closers]
        return at_random(left)(np.array(others or allowed.tolist()), left)

    for seed in range(12):
        model = closing_nothing if seed % 3 == 0 else at_random(seed)
        value = json.loads(written(constraint.fork(), len(least) + 5 * seed, model, tokenizer))
        assert CHECKED(schema).is_valid(value)
