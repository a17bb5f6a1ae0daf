"""JSON schemas as they are enforced: objects closed, JSON in one form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rksc_agents.errors import ConfigError

FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrtbf"\\',
}
"""JSON as ``json.dumps(value, ensure_ascii=False)`` writes it, which is how chat templates write it too."""

_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

_LISTS = ("allOf", "anyOf", "oneOf")
_ONE = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
_SEVERAL = ("prefixItems", *_LISTS)
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def embedded(schema: Mapping[str, Any]) -> str:
    """The schema as a part of a Lark grammar: ``%json {...}``, closed and in the form of ``json.dumps``.

    Raises
    ------
    ConfigError
        If the schema says itself how its JSON is written ("x-guidance"), wants a text with control characters, or wants
        several properties of any name: nothing keeps a name from coming twice.
    """
    if "x-guidance" in schema:
        raise ConfigError('"x-guidance" in a JSON schema: leave it out, JSON is always written as json.dumps writes it')
    return f"%json {json.dumps({**closed(schema), 'x-guidance': FORM}, ensure_ascii=False)}"


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `schema` where objects that declare "properties" have no others, unless they say so.

    Schemas that together describe one object ("allOf", or "anyOf" and "$ref" beside "properties") are closed for
    all the names that they declare between them.
    """
    copy: dict[str, Any] = _Closing(schema).schema(schema)
    return copy


class _Closing:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root

    def schema(self, schema: Any, shared: frozenset[str] = frozenset(), within: tuple[str, ...] = ()) -> Any:
        """`schema` closed for its own names and those that it shares an object with.

        `within` holds the references that are being written out.
        """
        if not isinstance(schema, Mapping):
            return schema
        _check(schema)
        copy = dict(schema)
        for key in _NAMED:
            if isinstance(copy.get(key), Mapping):
                copy[key] = {name: self.schema(part) for name, part in copy[key].items()}
        for key in _ONE:
            if key in copy:
                copy[key] = self.schema(copy[key])
        if isinstance(copy.get("prefixItems"), list):
            copy["prefixItems"] = [self.schema(part) for part in copy["prefixItems"]]
        self._together(schema, copy, shared, within)
        return copy

    def _together(
        self, schema: Mapping[str, Any], copy: dict[str, Any], shared: frozenset[str], within: tuple[str, ...]
    ) -> None:
        """Close what `copy` and its parts say about one object."""
        own = frozenset(schema.get("properties") or ())
        parts = {key: schema[key] for key in _LISTS if isinstance(schema.get(key), list)}
        all_of = frozenset(name for part in parts.get("allOf", ()) for name in self._names(part))
        some_of = frozenset(
            name for key in ("anyOf", "oneOf") for part in parts.get(key, ()) for name in self._names(part)
        )
        referred = self._names({"$ref": schema["$ref"]}) if "$ref" in schema else frozenset()
        for key, members in parts.items():
            others = shared | own | referred | all_of | (some_of if key == "allOf" else frozenset())
            copy[key] = [self.schema(member, others - self._names(member), within) for member in members]
        if "$ref" in schema and (beside := (shared | own | all_of | some_of) - referred):
            self._write_out(copy, beside, within)
        if "properties" in schema and "additionalProperties" not in schema:
            borrowed = (shared | all_of | some_of | referred) - own
            copy["properties"] = {**copy["properties"], **dict.fromkeys(sorted(borrowed), True)}
            copy["additionalProperties"] = False

    def _write_out(self, copy: dict[str, Any], shared: frozenset[str], within: tuple[str, ...]) -> None:
        """Put a schema that is referred to in place of the reference, closed for the names beside it as well."""
        reference = copy["$ref"]
        target = self._target(reference)
        if target is None or reference in within:
            return
        del copy["$ref"]
        copy["allOf"] = [*copy.get("allOf", ()), self.schema(target, shared, (*within, reference))]

    def _names(self, schema: Any, within: tuple[str, ...] = ()) -> frozenset[str]:
        """The properties that a schema declares for the object that it describes, itself or by its parts."""
        return frozenset(self._each_name(schema, within))

    def _each_name(self, schema: Any, within: tuple[str, ...]) -> Iterator[str]:
        if not isinstance(schema, Mapping):
            return
        yield from schema.get("properties") or ()
        for key in _LISTS:
            for part in schema.get(key) or ():
                yield from self._each_name(part, within)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in within:
            yield from self._each_name(self._target(reference), (*within, reference))

    def _target(self, reference: Any) -> Any:
        """What a reference within the schema leads to; None for others, which are refused later."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        place: Any = self.root
        for step in filter(None, reference[1:].split("/")):
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(place, Mapping) or name not in place:
                return None
            place = place[name]
        return place


def _check(schema: Mapping[str, Any]) -> None:
    """Refuse what would be enforced wrongly."""
    for key in ("const", "enum"):
        text = next(filter(_UNWRITABLE.search, _texts(schema.get(key))), None)
        if text is not None:
            raise ConfigError(
                f'the JSON schema uses "{key}" with {text!r}: leave the control characters out, they cannot be enforced'
            )
    least, most = schema.get("minProperties", 0), len(schema.get("properties") or ()) + 1
    if isinstance(least, int) and least > most:
        raise ConfigError(
            f'the JSON schema uses "minProperties": {least}, and a name that is not declared may come twice: at most '
            f"{most} can be enforced here, and one more for each property that is declared"
        )


def _texts(value: Any) -> Iterator[str]:
    """The texts in a JSON value, names included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from (name, *_texts(part))
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
