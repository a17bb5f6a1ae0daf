"""Where things stand in a trace's pictures: the tree, KV over time, the timeline, a verdict's entropy by layer.

Everything is in the units of an SVG's viewBox, which are pixels at full width. Colors are classes: "c0" for the least
confident to "c9" for the most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rksc_agents.printable import one_line
from rksc_agents.trace.outline import MARKS
from rksc_agents.trace.records import Span, SpanKind, Trace, TraceNode
from rksc_agents.types import Verdict

SHADES = 10
WIDTH = 760.0
_ROW, _BOX, _COLUMN, _TRUNK = 30.0, 22.0, 200.0, 130.0
_LABEL = 20  # characters that fit a box
KINDS: tuple[SpanKind, ...] = ("prefill", "decode", "verify")


@dataclass(frozen=True, slots=True)
class Box:
    """A branch in the tree: its place, what it says, and the edge that leads to it."""

    node: TraceNode
    x: float
    y: float
    label: str
    shade: str
    edge: str
    thickness: float


@dataclass(frozen=True, slots=True)
class TreePicture:
    """The tree from left to right, the prompt as its trunk."""

    width: float
    height: float
    trunk_top: float
    trunk_bottom: float
    boxes: tuple[Box, ...]
    box_width: float = _COLUMN - 46
    box_height: float = _BOX
    trunk: float = _TRUNK


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of time, in a row of the timeline."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    told: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points, and what its axes end at."""

    points: str
    area: str
    right: str
    top: str


def shades(trace: Trace) -> list[str]:
    """The class of each branch's confidence: by its value where all are from 0 to 1, else by its place among them."""
    values = [node.confidence for node in trace.nodes]
    low, high = (0.0, 1.0) if all(0 <= value <= 1 for value in values) else (min(values), max(values))
    return [shade(value, low, high) for value in values]


def shade(value: float, low: float = 0.0, high: float = 1.0) -> str:
    """The class of a confidence between `low` and `high`."""
    part = (value - low) / (high - low) if high > low else 1.0
    if not math.isfinite(part):
        part = 0.0
    return f"c{min(SHADES - 1, max(0, int(part * SHADES)))}"


def tree(trace: Trace) -> TreePicture:
    """Place the branches: a column for each step, a row for each line, a parent in the middle of its children."""
    level: dict[int | None, int] = {None: -1}
    for node in trace.nodes:
        level[node.index] = level[node.parent] + 1
    below: dict[int | None, list[TraceNode]] = {}
    for node in trace.nodes:
        below.setdefault(node.parent, []).append(node)
    rows: dict[int, float] = {}
    lines: dict[int, int] = {}
    free = 0
    for index in _leaves_first(below):
        children = [child.index for child in below.get(index, ())]
        rows[index] = (rows[children[0]] + rows[children[-1]]) / 2 if children else float(free)
        lines[index] = sum(lines[child] for child in children) or 1
        free += not children
    middle = {index: _ROW * (row + 0.5) + 6 for index, row in rows.items()}
    boxes = []
    for node, color in zip(trace.nodes, shades(trace), strict=True):
        x, y = _TRUNK + 40 + _COLUMN * level[node.index], middle[node.index]
        start_x, start_y = (_TRUNK, y) if node.parent is None else (x - 46, middle[node.parent])
        bend = (start_x + x) / 2
        edge = f"M{start_x:.1f} {start_y:.1f}C{bend:.1f} {start_y:.1f} {bend:.1f} {y:.1f} {x:.1f} {y:.1f}"
        boxes.append(Box(node, x, y - _BOX / 2, _label(node), color, edge, 1.5 + 2 * math.log2(lines[node.index])))
    firsts = [middle[node.index] for node in below[None]]
    return TreePicture(
        width=_TRUNK + 40 + _COLUMN * (1 + max(level.values())),
        height=_ROW * max(free, 2) + 12,
        trunk_top=min(firsts) - _BOX / 2,
        trunk_bottom=max(max(firsts) + _BOX / 2, min(firsts) - _BOX / 2 + 44),  # room for two lines of text
        boxes=tuple(boxes),
    )


def _leaves_first(below: dict[int | None, list[TraceNode]]) -> list[int]:
    """All branches, each after its children, in the order of their lines; not recursive, as chains may be long."""
    order: list[int] = []
    todo = list(below[None])
    while todo:
        node = todo.pop()
        order.append(node.index)
        todo.extend(below.get(node.index, ()))
    return order[::-1]


def _label(node: TraceNode) -> str:
    said = one_line(node.answer) if node.answer is not None else one_line(node.text)
    text = f"{MARKS[node.state][0]} {node.index} {'= ' if node.answer is not None else ''}{said}"
    return text if len(text) <= _LABEL else text[: _LABEL - 1] + "…"


def kv_curve(trace: Trace, height: float = 120.0) -> tuple[Curve, float | None] | None:
    """The request's KV over time, and the height of the budget where it is in the picture; None without samples."""
    samples = trace.kv_samples
    if len(samples) < 2:
        return None
    most = max(sample.request_bytes for sample in samples) or 1
    near = trace.kv_limit and trace.kv_limit <= 4 * most
    top = 1.08 * max(most, trace.kv_limit) if near else 1.15 * most
    last = max(trace.timings.total_s, samples[-1].at_s) or 1.0
    points = [(WIDTH * s.at_s / last, height * (1 - s.request_bytes / top)) for s in samples]
    return _curve(points, height, f"{last:.2f} s", ""), height * (1 - trace.kv_limit / top) if near else None


def entropy_curve(verdict: Verdict, depth: int, width: float = 220.0, height: float = 56.0) -> Curve | None:
    """The entropy of YES against NO by layer, from ln 2 at the top to 0; None with fewer than two layers."""
    if len(verdict.entropies) < 2:
        return None
    last = max(depth, *verdict.entropies)
    points = [(width * at / last, height * (1 - h / math.log(2))) for at, h in sorted(verdict.entropies.items())]
    return _curve(points, height, f"layer {last}", "ln 2")


def _curve(points: Sequence[tuple[float, float]], height: float, right: str, top: str) -> Curve:
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Curve(line, f"{points[0][0]:.1f},{height:.1f} {line} {points[-1][0]:.1f},{height:.1f}", right, top)


def timeline(trace: Trace) -> tuple[list[Bar], float]:
    """Bars for what the run waited for and for each branch, and the height of the picture."""
    ends = [span.end_s for span in trace.spans] + [node.end_s for node in trace.nodes]
    last = max([trace.timings.total_s, *ends]) or 1.0
    scale = WIDTH / last

    def bar(timed: Span | TraceNode, y: float, height: float, kind: str, name: str) -> Bar:
        seconds = timed.end_s - timed.start_s
        told = f"{name}: {seconds:.2f} s from {timed.start_s:.2f} s"
        return Bar(scale * timed.start_s, y, max(1.0, scale * seconds), height, kind, told)

    bars = [bar(span, 22.0 * KINDS.index(span.kind), 18.0, span.kind, span.kind) for span in trace.spans]
    top = 22.0 * len(KINDS) + 6
    step = min(8.0, max(3.0, 240.0 / len(trace.nodes)))
    bars += [
        bar(node, top + step * node.index, step - 1, node.state, f"branch {node.index}, {node.state}")
        for node in trace.nodes
    ]
    return bars, top + step * len(trace.nodes)
