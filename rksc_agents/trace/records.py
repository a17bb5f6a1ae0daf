"""What a trace records, and how it is kept: the schema, JSON in and out, `save`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, ValidationError, model_validator

from rksc_agents.errors import ConfigError
from rksc_agents.files import write_text
from rksc_agents.types import Branch, KVUsage, Record, Timings, Usage, VerificationUsage, Vote

if TYPE_CHECKING:
    from rich.console import RenderableType

VERSION = 1
"""Version of the schema. It grows by one where a reader of an older version would misread; fields are only added."""

FORMATS = (".html", ".json")
"""How the names of files end that :meth:`Trace.save` writes."""

State = Literal["running", "finished", "pruned", "stopped", "evicted", "chosen"]
"""What became of a branch: it still runs, it ended by itself, a search gave it up, it was cancelled or ended as
unsure, its KV was evicted before the run ended, or the answer is on its line."""

SpanKind = Literal["prefill", "decode", "verify"]
"""What a run waits for."""


class Span(Record):
    """A piece of a run's time, in seconds since the request was submitted."""

    kind: SpanKind
    start_s: float
    end_s: float


class KVSample(Record):
    """The KV cache at one moment.

    Attributes
    ----------
    at_s : float
        Seconds since the request was submitted.
    request_bytes : int
        Bytes that the request's branches held, each shared run counted once.
    held_bytes : int
        Bytes that all requests and cached prefixes held.
    """

    at_s: float
    request_bytes: int
    held_bytes: int


class TraceNode(Branch):
    """A branch of a run, and what became of it.

    Attributes
    ----------
    index : int
        Its place among the branches; `parent` is the index of the one that it goes on from.
    state : str
        "running", "finished", "pruned", "stopped", "evicted" or "chosen".
    pieces : tuple of str
        The text that became readable with each token, thinking and markers of calls included; where a branch was
        cancelled, one more piece with what was held back.
    confidences : tuple of float
        Of each token, in the measure that the strategy uses; the likeliest token's probability by default.
    kv_bytes : int
        Bytes of KV that are the branch's own; what it shares with others is its prompt's or its parent's.
    start_s, end_s : float
        Seconds since the request was submitted.

    Examples
    --------
    >>> result.trace.nodes[0].state
    'chosen'
    """

    index: int
    state: State
    pieces: tuple[str, ...] = ()
    confidences: tuple[float, ...] = ()
    kv_bytes: int = 0
    start_s: float = 0.0
    end_s: float = 0.0

    @property
    def score(self) -> float | None:
        """The verifier's score in [0, 1]; None where there is none."""
        return None if self.verdict is None else self.verdict.score


class Trace(Record):
    """A run as a tree of branches under one prompt.

    ``print(trace)`` draws it as text, a notebook as its page; :meth:`save` keeps it.

    Attributes
    ----------
    version : int
        Of this schema.
    question : str
        The text of the last user message.
    model, strategy : str
        Who answered, and how.
    rule : str or None
        Which rule decided the vote.
    answer : str or None
        What came out.
    winner : int
        Index of the winning branch.
    votes : tuple of Vote
        Best first.
    nodes : tuple of TraceNode
        The branches in the order they were forked; a parent comes before its children.
    prompt_tokens : int
        Length of the first prompt, which branches without a parent share.
    depth : int
        Layers of the model.
    spans : tuple of Span
        What the run waited for, and when.
    kv_samples : tuple of KVSample
        The KV cache over time.
    kv_limit : int
        The budget in bytes.
    verification, usage, kv, timings
        As in the result.

    Examples
    --------
    >>> trace = reasoner.reason("What is 17 + 25?").trace  # doctest: +SKIP
    >>> trace.save("run.html")  # doctest: +SKIP
    """

    version: int = VERSION
    question: str
    model: str
    strategy: str
    rule: str | None = None
    answer: str | None = None
    winner: int
    votes: tuple[Vote, ...] = ()
    nodes: tuple[TraceNode, ...]
    prompt_tokens: int = 0
    depth: int = 0
    spans: tuple[Span, ...] = ()
    kv_samples: tuple[KVSample, ...] = ()
    kv_limit: int = 0
    verification: VerificationUsage = Field(default_factory=VerificationUsage)
    usage: Usage
    kv: KVUsage
    timings: Timings

    @model_validator(mode="after")
    def _is_a_tree(self) -> Self:
        if not self.nodes or not 0 <= self.winner < len(self.nodes):
            raise ValueError(f"winner = {self.winner}: the trace has {len(self.nodes)} nodes")
        for place, node in enumerate(self.nodes):
            if node.index != place or (node.parent is not None and not 0 <= node.parent < place):
                raise ValueError(f"node {place} has index {node.index} and parent {node.parent}: parents come first")
        return self

    def children(self, index: int | None) -> Iterator[TraceNode]:
        """The nodes that go on from node `index`; with None those that start at the prompt."""
        return (node for node in self.nodes if node.parent == index)

    def save(self, path: str | Path) -> None:
        """Write the trace to a file, whole or not at all.

        Parameters
        ----------
        path : str or Path
            Ends in ".html" for one page that needs nothing else, or in ".json" for :meth:`load`.

        Raises
        ------
        ConfigError
            If the name ends otherwise, or the file cannot be written.
        """
        match Path(path).suffix.lower():
            case ".html":
                from rksc_agents.trace.page import page

                write_text(path, page(self))
            case ".json":
                write_text(path, self.model_dump_json() + "\n")
            case _:
                raise ConfigError(f"{path} is neither .html nor .json: give the page or the data one of these names")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a trace that was saved as JSON.

        Raises
        ------
        ConfigError
            If the file cannot be read, holds no trace, or one of a newer version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}): give a file that Trace.save has written") from error
        return cls.parse(text, name=str(path))

    @classmethod
    def parse(cls, text: str, *, name: str = "the text") -> Self:
        """Read a trace from JSON; `name` is what errors call it.

        Raises
        ------
        ConfigError
            If it is no trace, or one of a newer version.
        """
        try:
            data = json.loads(text)
            version = data["version"]
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{name} holds no trace: give what Trace.save has written as .json") from error
        if not isinstance(version, int) or not 1 <= version <= VERSION:
            raise ConfigError(
                f"{name} holds a trace of version {version!r}, this rksc-agents reads 1 to {VERSION}: upgrade it"
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ConfigError(f"{name} is a damaged trace: {error.errors()[0]['msg']}") from error

    def __rich__(self) -> RenderableType:
        from rksc_agents.trace.outline import outline

        return outline(self)

    def __str__(self) -> str:
        from rksc_agents.trace.outline import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from rksc_agents.trace.page import framed

        return framed(self)
