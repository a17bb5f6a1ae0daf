"""A trace as one page for a browser: it needs no network, and runs nothing but its own few lines of script.

Every text is escaped, and a content security policy names the script and the styles by their hashes: what a model or a
user wrote cannot run even if it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING

from rksc_agents.printable import clean, one_line, size
from rksc_agents.trace import pictures
from rksc_agents.trace.outline import MARKS
from rksc_agents.trace.records import Trace, TraceNode

if TYPE_CHECKING:
    from jinja2 import Template

_SHOWN = 400_000  # characters of all branches that a page shows
_TOLD = 400  # of a branch, where the pointer rests on it


def page(trace: Trace) -> str:
    """The whole page as HTML."""
    script, style = _part("page.js"), _part("page.css")
    bars, height = pictures.timeline(trace)
    picture = pictures.tree(trace)
    return _template().render(
        trace=trace,
        script=script,
        style=style,
        policy=f"default-src 'none'; img-src data:; script-src {_hash(script)}; style-src {_hash(style)}",
        tree=picture,
        boxes=picture.boxes,
        marks=MARKS,
        kv=pictures.kv_curve(trace),
        bars=bars,
        kinds=pictures.KINDS,
        timeline_height=height,
        width=pictures.WIDTH,
        shades=range(pictures.SHADES),
        most=max((vote.weight for vote in trace.votes), default=0.0),
        said=lambda node: _said(node, max(200, _SHOWN // len(trace.nodes))),
        told=lambda node: one_line(node.text or node.thinking)[:_TOLD],
        entropy=lambda verdict: pictures.entropy_curve(verdict, trace.depth),
        clean=clean,
        one_line=one_line,
        size=size,
    )


def framed(trace: Trace) -> str:
    """The page inside a frame of its own, for a notebook."""
    from markupsafe import escape

    style = "width:100%;height:640px;border:1px solid #8888"
    return f'<iframe sandbox="allow-scripts" style="{style}" title="trace" srcdoc="{escape(page(trace))}"></iframe>'


def _said(node: TraceNode, most: int) -> tuple[list[tuple[str, str]], int]:
    """A branch's text in runs of one shade, at most `most` characters of it, and how many were left out."""
    shades = [pictures.shade(value) for value in node.confidences]
    shades += ["c9"] * (len(node.pieces) - len(shades))
    runs, left = [], most
    for color, group in groupby(zip(shades, node.pieces, strict=False), key=lambda pair: pair[0]):
        text = clean("".join(piece for _, piece in group))
        if left > 0 and text:
            runs.append((color, text[:left]))
        left -= len(text)
    return runs, max(0, -left)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _part(name: str) -> str:
    return (files("rksc_agents.trace") / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_part("page.html"))
