"""What an answer must look like, as the user says it: JSON of a schema, a regular expression, one of some texts.

::

    Grammar
    ├── JSONSchema    JSON that fits a schema or a pydantic model
    ├── Regex         text that a regular expression matches as a whole
    ├── Choice        one of some texts
    └── Lark          text of a grammar in llguidance's dialect of Lark
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.errors import PydanticUserError

from rksc_agents.errors import ConfigError
from rksc_agents.model.json_schema import closed, embedded

__all__ = ["Choice", "Grammar", "JSONSchema", "Lark", "Regex", "after_thinking", "closed", "reason"]


@dataclass(frozen=True, eq=False)
class Grammar(ABC):
    """What an answer must look like. Two grammars are equal if they are of one kind and say the same.

    Attributes
    ----------
    key : str
        What the grammar says, as one text; equal for equal grammars.
    instruction : str or None
        A text that tells the model what to write; None where nothing short can be said.

    Examples
    --------
    >>> Choice("a", "b") == Choice("a", "b")
    True
    """

    @property
    def key(self) -> str:
        """What tells equal grammars."""
        return f"{type(self).__name__}:{self.lark()}"

    @property
    def instruction(self) -> str | None:
        """What the model is told about it in the prompt; None for nothing."""
        return None

    @abstractmethod
    def lark(self) -> str:
        """The grammar in llguidance's dialect of Lark, with a rule ``start``."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grammar) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, eq=False, init=False)
class JSONSchema(Grammar):
    """JSON that fits a schema, written as ``json.dumps`` writes it: ", " and ": " and no other white space.

    An object that declares "properties" and does not say "additionalProperties" has no others: a model that may
    invent keys never ends. ``{"type": "object"}`` alone is any JSON object. Keywords that cannot be enforced while
    tokens are drawn ("not", "uniqueItems", "if", unknown formats) are refused when the grammar is compiled.

    Parameters
    ----------
    schema : mapping, or class of a pydantic model
        The schema; references within it ("$defs") are followed, others are not.

    Raises
    ------
    ConfigError
        If `schema` is neither, or cannot be written as JSON.

    Examples
    --------
    >>> reasoner.reason("Q", strategy="direct", grammar=JSONSchema({"type": "boolean"})).text in ("true", "false")
    True
    """

    schema: Mapping[str, Any]
    _text: str = field(init=False, repr=False)

    def __init__(self, schema: Mapping[str, Any] | type[BaseModel]) -> None:
        if isinstance(schema, type) and issubclass(schema, BaseModel):
            schema = _schema_of(schema)
        if not isinstance(schema, Mapping):
            raise ConfigError(
                f"JSONSchema({schema!r}): give a JSON schema as a mapping, or a class of a pydantic model"
            )
        try:
            text = json.dumps(schema, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"JSONSchema({schema!r}) is no JSON ({error}): use texts, numbers, lists and dicts"
            ) from None
        object.__setattr__(self, "schema", json.loads(text))  # a copy, so that nobody changes it later
        object.__setattr__(self, "_text", text)

    @property
    def instruction(self) -> str:
        """The schema, as the model is told it in the prompt."""
        kind = "a JSON object" if self.schema.get("type") == "object" else "JSON"
        free = self.schema.get("type", "object") == "object" and self.schema.keys() <= {"type", "title"}
        if free:  # nothing to fit: small models would write the schema itself
            return f"Answer with {kind}."
        return f"Answer with {kind} that fits this JSON schema:\n{self._text}"

    def lark(self) -> str:
        return f"start: {embedded(self.schema)}"


def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    try:
        return model.model_json_schema()
    except PydanticUserError as error:
        raise ConfigError(
            f"JSONSchema({model.__name__}): pydantic has no JSON schema for it ({error.message}); give the schema as a "
            "mapping"
        ) from None


@dataclass(frozen=True, eq=False)
class Regex(Grammar):
    r"""Text that a regular expression matches as a whole.

    Parameters
    ----------
    pattern : str
        In the syntax of Rust's regex crate: like Python's, without back references, look-around and ``\b``;
        ``\d`` is 0 to 9.

    Raises
    ------
    ConfigError
        If the pattern is malformed or has what cannot be enforced.

    Examples
    --------
    >>> len(reasoner.reason("Q", strategy="direct", grammar=Regex("[0-9]{3}")).text)
    3
    """

    pattern: str

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str) or not self.pattern:
            raise ConfigError(f"Regex({self.pattern!r}): give a regular expression as a text that is not empty")
        import llguidance  # slow to load, and most runs have no grammar

        error = llguidance.LLMatcher.validate_grammar(self.lark())
        if error:
            raise ConfigError(
                f"Regex({self.pattern!r}) cannot be enforced: {reason(error)}. Write it without back references, "
                "look-around and word boundaries"
            )

    def lark(self) -> str:
        import llguidance

        return f"start: TEXT\nTEXT: /{llguidance.regex_to_lark(self.pattern, 'd')}/"


@dataclass(frozen=True, eq=False, init=False)
class Choice(Grammar):
    """One of some texts.

    Parameters
    ----------
    *options : str
        The texts, each of them different and none of them empty.

    Raises
    ------
    ConfigError
        If there is none, or one is empty, no text, or there twice.

    Examples
    --------
    >>> reasoner.reason("Q", strategy="direct", grammar=Choice("yes", "no")).text in ("yes", "no")
    True
    """

    options: tuple[str, ...]

    def __init__(self, *options: str) -> None:
        if not options or not all(isinstance(option, str) and option for option in options):
            raise ConfigError(f"Choice{options!r}: give at least one text, none of them empty, as Choice('yes', 'no')")
        if len(set(options)) < len(options):
            raise ConfigError(f"Choice{options!r}: give each text once")
        object.__setattr__(self, "options", options)

    @property
    def instruction(self) -> str:
        """The texts, as the model is told them in the prompt."""
        return f"Answer with one of: {', '.join(self.options)}"

    def lark(self) -> str:
        return "start: " + " | ".join(json.dumps(option, ensure_ascii=False) for option in self.options)


@dataclass(frozen=True, eq=False)
class Lark(Grammar):
    """Text of a grammar in llguidance's dialect of Lark.

    Parameters
    ----------
    text : str
        The grammar, with a rule ``start``. It is checked when it is compiled for a model's tokenizer.

    Raises
    ------
    ConfigError
        If it is no text or has no rule ``start``.

    Examples
    --------
    >>> reasoner.reason("Q", strategy="direct", grammar=Lark('start: "a" | "b"')).text in ("a", "b")
    True
    """

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not any(
            line.split(":")[0].strip() == "start" for line in _lines(self.text)
        ):
            raise ConfigError(
                f'Lark({self.text!r}): give a grammar with a rule "start", as Lark(\'start: "yes" | "no"\')'
            )

    def lark(self) -> str:
        return self.text


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if ":" in line]


def after_thinking(lark: str, closings: Sequence[str | int]) -> str:
    """The same grammar behind free text; for a prompt that ends inside a thinking block.

    Parameters
    ----------
    lark : str
        A grammar with a rule ``start``.
    closings : sequence of str or int
        What ends the free text, as texts or as ids of tokens: the first of them that comes. White space may follow.

    Raises
    ------
    ConfigError
        If there is no closing, or one is empty or no token id.
    """
    if not closings or not all(
        (isinstance(closing, str) and closing) or (type(closing) is int and closing >= 0) for closing in closings
    ):
        raise ConfigError(f"closings = {closings!r}: give at least one text or token id that ends the thinking")
    texts = [closing for closing in closings if isinstance(closing, str)]
    tokens = [f"<[{closing}]>" for closing in closings if not isinstance(closing, str)]
    rules, ways = [], []
    if texts:
        ways.append("closed_by_text")
        rules.append(f"closed_by_text[lazy]: /(?s:.*)({'|'.join(map(_quoted, texts))})/")
    if tokens:
        ways.append(f"free ({' | '.join(tokens)})")
        rules.append("free: /(?s:.*)/")
    body = f"answer: %lark {{\n{lark}\n}}"
    return "\n".join(["start: thinking space answer", f"thinking: {' | '.join(ways)}", *rules, r"space: /\s*/", body])


def _quoted(text: str) -> str:
    """A regular expression of just this text, between slashes."""
    return "".join(f"\\{letter}" if letter in r"\/.^$*+?()[]{}|" else letter for letter in text).replace("\n", r"\n")


def reason(error: str) -> str:
    """What llguidance has against a grammar, without its picture of the place."""
    lines = [line.strip() for line in error.partition("<state>")[0].splitlines()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    first = lines[0].rstrip(":") if lines else ""
    place, colon, rest = first.partition("): ")
    first = rest if colon and place.startswith("at ") else first
    first = first.removeprefix("failed to compile JSON schema: ")
    return ": ".join([first, *told])
