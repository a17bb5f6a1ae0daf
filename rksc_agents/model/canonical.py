"""One spelling for each meaning of a JSON value: what branches vote on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_MOST_DIGITS = 400  # as many as the largest float has, and more
_DEEPEST = 64  # a schema may refer to itself
_DEFAULT = 16  # how much a default counts as depth: defaults of defaults branch out


def canonical(value: Any, schema: Mapping[str, Any] | None = None) -> str:
    """JSON text that two values share exactly where they mean the same under a schema.

    Keys are sorted, ``5.0`` is ``5``, texts lose their outer white space, defaults that the schema gives are filled in;
    where the schema wants a number a text that spells one is that number, and where it wants a text a number is its
    text.

    Parameters
    ----------
    value : object
        What ``json.loads`` returns.
    schema : mapping or None
        Its JSON schema; None for any value.
    """
    plain = _canonical(value, schema or {}, schema or {}, 0)
    return json.dumps(plain, sort_keys=True, ensure_ascii=False)


def _canonical(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Any:
    schema = _resolved(value, schema, root)
    if depth > _DEEPEST:
        return value
    if isinstance(value, Mapping):
        return _object(value, schema, root, depth)
    if isinstance(value, (list, tuple)):
        items = schema.get("items")
        parts = items if isinstance(items, Mapping) else {}
        return [_canonical(item, parts, root, depth + 1) for item in value]
    return _scalar(value, kinds(schema, root))


def _object(value: Mapping[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    listed = schema.get("properties")
    parts: Mapping[str, Any] = listed if isinstance(listed, Mapping) else {}
    defaults = {name: part["default"] for name in parts if "default" in (part := _plain(parts[name], root))}
    others = schema.get("additionalProperties")
    rest = others if isinstance(others, Mapping) else {}
    result = {}
    for name, item in {**defaults, **value}.items():
        part = parts.get(name, rest)
        more = _DEFAULT if name in defaults and item == defaults[name] else 1
        result[str(name)] = _canonical(item, part if isinstance(part, Mapping) else {}, root, depth + more)
    return result


def _plain(part: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A property's schema, its reference followed for what it does not say itself."""
    for _ in range(_DEEPEST):
        if not isinstance(part, Mapping) or not isinstance(reference := part.get("$ref"), str):
            break
        part = {**_referred(reference, root), **{key: value for key, value in part.items() if key != "$ref"}}
    return part if isinstance(part, Mapping) else {}


def _scalar(value: Any, types: set[str]) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        value = _number(value)
    numeric = types & {"integer", "number"}
    if isinstance(value, str):
        value = value.strip()
        return _spelled(value) if numeric and "string" not in types else value
    return json.dumps(value) if "string" in types and not numeric else value


def _number(value: float) -> float | int | str:
    """A number in its one form: whole ones as integers, the digits those that JSON would write."""
    if not math.isfinite(value):
        return str(value)
    return int(Decimal(repr(value))) if value.is_integer() else value


def _spelled(text: str) -> Any:
    """The number that a text spells, else the text."""
    if len(text) > _MOST_DIGITS or not _NUMBER.fullmatch(text):
        return text
    try:
        return int(text)
    except ValueError:
        number = float(text)
        return _number(number) if math.isfinite(number) else text


def _resolved(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that speaks about `value`: references followed, the fitting one of several, several in one."""
    for _ in range(_DEEPEST):
        if isinstance(reference := schema.get("$ref"), str):
            schema = {**_referred(reference, root), **{k: v for k, v in schema.items() if k != "$ref"}}
        elif isinstance(parts := schema.get("allOf"), list):
            schema = _joined([*parts, {k: v for k, v in schema.items() if k != "allOf"}], root)
        elif choices := next((c for name in ("anyOf", "oneOf") if isinstance(c := schema.get(name), list)), None):
            rest = {k: v for k, v in schema.items() if k not in ("anyOf", "oneOf")}
            known = [part for part in choices if isinstance(part, Mapping)]
            none = {"type": sorted(kinds(schema, root))}  # no choice fits as it is: one may after a conversion
            schema = {**next((part for part in known if _fits(value, part, root)), none), **rest}
        else:
            break
    return schema


def _joined(parts: Sequence[Any], root: Mapping[str, Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for given in parts:
        if not isinstance(given, Mapping):
            continue
        part = _referred(reference, root) if isinstance(reference := given.get("$ref"), str) else given
        properties = {**joined.get("properties", {}), **part.get("properties", {})}
        joined |= part
        if properties:
            joined["properties"] = properties
    return joined


def _referred(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    at: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        at = at.get(name.replace("~1", "/").replace("~0", "~"), {}) if isinstance(at, Mapping) else {}
    return at if isinstance(at, Mapping) else {}


def _fits(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether a value is of a type that the schema allows, and an object has what it requires."""
    schema = _plain(schema, root)
    if isinstance(value, Mapping) and not set(schema.get("required") or ()) <= value.keys():
        return False
    types = kinds(schema, root)
    return not types or kind_of(value) in types or (kind_of(value) == "integer" and "number" in types)


def kinds(schema: Mapping[str, Any], root: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows, as JSON schema names them; none where it does not say."""
    return _kinds(schema, root, 0)


def _kinds(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    schema = _plain(schema, root)
    if "type" in schema:
        types = schema["type"]
        return {types} if isinstance(types, str) else set(map(str, types))
    if "const" in schema:
        return {kind_of(schema["const"])}
    if isinstance(options := schema.get("enum"), list):
        return set(map(kind_of, options))
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(choices := schema.get(name), list) and depth < _DEEPEST // 8:
            each = [_kinds(choice, root, depth + 1) for choice in choices]
            told = [types for types in each if types]
            if name == "allOf":
                return set.intersection(*told) if told else set()
            return set().union(*each) if len(told) == len(each) else set()
    return set()


def kind_of(value: Any) -> str:
    """The type of a value, as JSON schema names it; whole numbers are integers."""
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return names.get(type(value), "object" if isinstance(value, Mapping) else "array")
