"""A trace in a terminal: the tree of branches, one line each, the prompt as their trunk."""

from __future__ import annotations

import io
from collections import Counter

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from rksc_agents.printable import one_line, size
from rksc_agents.trace.records import State, Trace, TraceNode

MARKS: dict[State, tuple[str, str]] = {
    "running": ("…", "yellow"),
    "finished": ("·", ""),
    "pruned": ("×", "dim"),
    "stopped": ("-", "dim"),
    "evicted": ("~", "dim"),
    "chosen": ("★", "bold green"),
}
"""By state, what stands before a branch and its style."""

_WIDTH = 110  # of lines that go to no terminal
_SAID = 60  # characters of a branch's text where it has no answer


def outline(trace: Trace) -> Tree:
    """The tree as something `rich` can print."""
    root = Tree(_trunk(trace), guide_style="dim")
    drawn: dict[int | None, Tree] = {None: root}
    for node in trace.nodes:  # a parent comes before its children
        drawn[node.index] = drawn[node.parent].add(_line(node))
    return root


def as_text(trace: Trace) -> str:
    """The tree without colors."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    console.print(outline(trace))
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]


def _trunk(trace: Trace) -> Text:
    said = one_line(trace.answer) if trace.answer is not None else "none"
    states = Counter(node.state for node in trace.nodes if node.state in ("pruned", "stopped", "evicted"))
    lost = "".join(f", {count} {state}" for state, count in sorted(states.items()))
    return Text.assemble(
        (one_line(trace.question), "bold"),
        (f"\n{one_line(trace.strategy)}: ", "dim"),
        (said, "bold green"),
        (
            f"  prompt {trace.prompt_tokens} tokens, shared by {len(trace.nodes)} branches{lost}, "
            f"KV {size(trace.kv.peak_bytes)}, {trace.timings.total_s:.2f} s",
            "dim",
        ),
    )


def _line(node: TraceNode) -> Text:
    mark, style = MARKS[node.state]
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{mark} {node.index} ", style or "cyan")
    if node.answer is not None:
        line.append(f"= {one_line(node.answer)} ", style or "bold")
    facts = [f"{len(node.tokens)} tokens", f"confidence {node.confidence:.2f}"]
    if (verdict := node.verdict) is not None:
        facts.append("verification skipped" if verdict.skipped else f"score {_number(verdict.score)}")
        if verdict.exit_layer is not None:
            facts.append(f"exit at layer {verdict.exit_layer}")
    if node.sharing.mode != "exact":
        facts.append(f"{node.sharing.mode}, {node.sharing.reused} tokens reused")
    if node.state not in ("finished", "chosen"):
        facts.append(node.state)
    elif node.finish_reason == "length":
        facts.append("cut at max_tokens")
    line.append(f"({', '.join(facts)}) ", "dim")
    if node.answer is None:
        line.append(one_line(node.text)[:_SAID], "dim" if node.state != "chosen" else style)
    return line


def _number(score: float | None) -> str:
    return "none" if score is None else f"{score:.2f}"
