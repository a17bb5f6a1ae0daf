"""A run in a terminal: its branches while they grow, its evidence at the end, the same facts as plain lines.

All text of a model or a user is drawn as it is, never as markup, and without the control characters that
would move the cursor, change colors or reverse the reading order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from rksc_agents.events import BranchEnd, BranchToken, BranchVerified, Event, VoteChanged
from rksc_agents.printable import clean, one_line, size
from rksc_agents.result import ReasoningResult
from rksc_agents.types import Branch, FinishReason, SharingRecord, Verdict, Vote

_TAIL = 600  # characters of a branch kept for its one line: more than any terminal is wide
_BAR = 24  # cells of the longest bar


@dataclass(slots=True)
class _Row:
    state: FinishReason | None = None
    tokens: int = 0
    tail: str = ""
    answer: str | None = None
    verdict: Verdict | None = None


class BranchView:
    """The branches of a running request, one line each, and the standing of the votes.

    Feed it the events of a stream and draw it with `rich`, for example inside ``rich.live.Live``.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._votes: tuple[Vote, ...] = ()

    def feed(self, event: Event) -> None:
        """Take one event into account; an :class:`Answer` changes nothing."""
        if isinstance(event, BranchToken):
            row = self._row(event.branch)
            row.tokens += 1
            row.tail = (row.tail + event.thinking + event.text)[-_TAIL:]
        elif isinstance(event, BranchEnd):
            row = self._row(event.branch)
            row.state, row.answer, row.tail = event.finish_reason, event.answer, event.text[-_TAIL:]
        elif isinstance(event, BranchVerified):
            self._row(event.branch).verdict = event.verdict
        elif isinstance(event, VoteChanged):
            self._votes = event.votes

    def _row(self, branch: int) -> _Row:
        return self._rows.setdefault(branch, _Row())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self._rows:
            yield Text("reading the prompt", style="dim")
            return
        # The votes come first: a terminal with too few lines cuts the branches, not the standing.
        if self._votes:
            standing = "  ".join(f"{one_line(vote.answer)} ({vote.weight:g})" for vote in self._votes)
            yield Text(f"votes: {standing}", style="bold", no_wrap=True, overflow="ellipsis")
        digits = len(str(max(self._rows)))
        for index, row in sorted(self._rows.items()):
            line = Text(no_wrap=True, overflow="ellipsis")
            line.append(f"{index:>{digits}} ", style="cyan")
            line.append(f"{row.state or 'writing':<9} ", style="dim" if row.state else "yellow")
            line.append(f"{row.tokens:>5} ", style="dim")
            if row.answer is not None:
                line.append(f"= {one_line(row.answer)} ", style="bold green")
            if row.verdict is not None:
                line.append(f"({_score(row.verdict, 2)}) ", style="magenta")
            line.append(_last_cells(one_line(row.tail), options.max_width - line.cell_len), style="dim")
            yield line


def _last_cells(text: str, width: int) -> str:
    """Return the end of `text` that fills at most `width` cells; wide characters take two."""
    used = 0
    for start in range(len(text) - 1, -1, -1):
        used += cell_len(text[start])
        if used > width:
            return text[start + 1 :]
    return text


def summary(result: ReasoningResult) -> RenderableType:
    """Return the evidence of a finished run as something `rich` can print.

    Parameters
    ----------
    result : ReasoningResult
        What ``RKSCReasoner.reason`` returned or a stream's :class:`Answer` holds.
    """
    parts: list[RenderableType] = [Text(), Text(clean(result.text).strip()), Text()]
    answer = result.text if result.answer is None else result.answer
    figures = list(_figures(result))
    noted = enumerate(result.branches)
    notes = [(f"branch {index}", f"{name}: {note}") for index, branch in noted for name, note in _notes(branch, result)]
    width = max(len(name) for name, _ in [("answer", ""), *notes, *figures]) + 2
    by = "" if result.rule is None else f"  by {one_line(result.rule)}"
    parts.append(Text.assemble((f"{'answer':<{width}}", "bold"), (one_line(answer), "bold green"), (by, "dim")))
    if result.votes:
        most = max(vote.weight for vote in result.votes)
        votes = Table.grid(padding=(0, 1))
        for vote in result.votes:
            cells = max(1, round(_BAR * vote.weight / most)) if vote.weight > 0 else 0
            votes.add_row(Text(one_line(vote.answer)), Text("█" * cells, "green"), Text(_support(vote), "dim"))
        parts.append(votes)
    parts += [Text(f"{name:<{width}}{note}", "dim") for name, note in notes]
    parts += [Text(f"{name:<{width}}{fact}") for name, fact in figures]
    return Group(*parts)


def brief(result: ReasoningResult) -> str:
    """Return the evidence of a finished run as one line."""
    usage, facts = result.usage, []
    if result.agreement is not None:
        facts.append(f"{one_line(result.answer or 'none')} by {result.agreement:.0%} of the votes")
    if result.verification.skipped:
        facts.append(f"{result.verification.skipped} verifications skipped")
    if stopped := sum(branch.finish_reason in ("cancelled", "unsure") for branch in result.branches):
        facts.append(f"{stopped} branches stopped early")
    facts.append(f"prompt {usage.prompt_tokens} tokens, {usage.prompt_tokens_reused} of them reused")
    return ", ".join([*facts, f"{result.timings.total_s:.2f} s"])


def plain(result: ReasoningResult) -> Iterator[str]:
    """Yield the evidence of a finished run as lines for a pipe: ``name: facts``, always in this order."""
    yield f"answer: {one_line(result.text if result.answer is None else result.answer)}"
    yield "text:"
    # The indent keeps a model from writing a line that reads like one of ours.
    yield from (f"  {clean(line)}".rstrip() for line in result.text.strip().splitlines())
    by = "" if result.rule is None else f", rule {one_line(result.rule)}"
    yield f"strategy: {one_line(result.strategy)}, branches {len(result.branches)}, winner {result.winner}{by}"
    for index, branch in enumerate(result.branches):
        given = "none" if branch.answer is None else one_line(branch.answer)
        facts = f"{branch.finish_reason}, tokens {len(branch.tokens)}, confidence {branch.confidence:.4f}"
        yield f"branch {index}: {facts}, answer {given}"
        yield from (f"{name} {index}: {note}" for name, note in _notes(branch, result))
    for vote in result.votes:
        yield f"vote: {one_line(vote.answer)}, {_support(vote)}"
    yield from (f"{name}: {fact}" for name, fact in _figures(result))


def facts(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a nested mapping as ``outer.inner: value`` lines."""
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from facts(value, f"{prefix}{key}.")
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            yield one_line(f"{prefix}{key}: {', '.join(map(_word, values))}")


def _word(value: object) -> str:
    return {True: "yes", False: "no", None: "none"}[value] if isinstance(value, bool | None) else str(value)


def _support(vote: Vote) -> str:
    return f"weight {vote.weight:g}, branches {' '.join(map(str, vote.branches))}"


def _notes(branch: Branch, result: ReasoningResult) -> Iterator[tuple[str, str]]:
    """Yield what is special about a branch, by name: its place in a tree, its verdict, what it shared."""
    if branch.parent is not None or branch.depth:
        yield "place", f"depth {branch.depth}, parent {'none' if branch.parent is None else branch.parent}"
    for call in branch.tool_calls:
        yield "call", one_line(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}")
    for wrong in branch.invalid_tool_calls:
        yield "invalid call", one_line(wrong.error)
    if branch.verdict is not None:
        yield "verdict", _verdict(branch.verdict, result)
    if branch.sharing.mode != "exact" or branch.sharing.kl is not None:
        yield "sharing", _shared(branch.sharing)


def _score(verdict: Verdict, digits: int) -> str:
    if verdict.score is None:
        return "skipped" if verdict.skipped else "not verified"
    return f"{verdict.score:.{digits}f}"


def _verdict(verdict: Verdict, result: ReasoningResult) -> str:
    if verdict.score is None:
        return _score(verdict, 4)
    known = [branch.verdict for branch in result.branches if branch.verdict is not None and branch.verdict.layers]
    facts = [f"score {_score(verdict, 4)}"]
    if verdict.exit_layer is not None:
        facts.append(f"exit layer {verdict.exit_layer} of {result.verification.layers_full // max(1, len(known))}")
    if verdict.layers:
        facts.append(f"layers {verdict.layers}, tokens {verdict.tokens_computed}")
    return ", ".join(facts)


def _shared(record: SharingRecord) -> str:
    measured = {"sigma": record.sigma, "kl": record.kl, "agreement": record.agreement}
    facts = [record.mode, f"reused {record.reused}, recomputed {record.recomputed}"]
    facts += [f"{name} {value:.4f}" for name, value in measured.items() if value is not None]
    return ", ".join(facts)


def _figures(result: ReasoningResult) -> Iterator[tuple[str, str]]:
    """Yield what the run took, by name: the facts that both forms of the report print."""
    usage, kv, timings = result.usage, result.kv, result.timings
    yield (
        "tokens",
        f"prompt {usage.prompt_tokens} ({usage.prompt_tokens_computed} computed, {usage.prompt_tokens_reused} reused), "
        f"completion {usage.completion_tokens} ({usage.completion_tokens_winner} by the winner)",
    )
    saved = f" ({1 - kv.peak_bytes / kv.bytes_if_copied:.0%} saved)" if kv.bytes_if_copied else ""
    yield (
        "kv",
        f"peak {size(kv.peak_bytes)}, {size(kv.bytes_if_copied)} if copied{saved}, "
        f"{kv.tokens_shared} tokens shared, {kv.evicted} nodes evicted, {kv.recomputed} tokens recomputed",
    )
    if (done := result.verification).verifier is not None:
        spared = f" ({1 - done.layers / done.layers_full:.0%} saved)" if done.layers_full else ""
        yield (
            "verification",
            f"{one_line(done.verifier)}, exit {one_line(done.exit)}, {done.verified} verified, {done.skipped} skipped, "
            f"{done.exited} exited early, {done.tokens_computed} tokens, layers {done.layers} of {done.layers_full}"
            f"{spared}",
        )
    if (rounded := result.quantization) is not None:
        yield (
            "quantization",
            f"int8, {rounded.layers} layers, divergence {rounded.divergence:.4f}, agreement {rounded.agreement:.3f}",
        )
    yield (
        "time",
        f"{timings.total_s:.2f} s in all, {timings.queue_s:.2f} s queued, "
        f"prefill {timings.prefill_s:.2f} s, decode {timings.decode_s:.2f} s, verify {timings.verify_s:.2f} s",
    )
