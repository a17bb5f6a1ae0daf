"""Watching a run in a terminal: its branches while they grow, its votes while they change."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rksc_agents.errors import EngineError

if TYPE_CHECKING:
    from rich.console import Console

    from rksc_agents.reasoner import RKSCReasoner
    from rksc_agents.result import ReasoningResult
    from rksc_agents.types import Prompt

REFRESH_S = 0.1  # a faster redraw costs the model time and the eye sees no more


def watch(
    reasoner: RKSCReasoner, prompt: Prompt, settings: Mapping[str, Any], console: Console, *, keep: bool = True
) -> ReasoningResult:
    """Ask, and draw what happens until the answer is there.

    Parameters
    ----------
    reasoner : RKSCReasoner
        Answers.
    prompt : str or messages
        What is asked.
    settings : mapping
        Options of :meth:`~rksc_agents.reasoner.RKSCReasoner.stream`.
    console : Console
        A terminal.
    keep : bool, default True
        Leave the branches on the screen at the end.
    """
    from rich.live import Live

    from rksc_agents.events import Answer
    from rksc_agents.report.terminal import BranchView

    view, result, drawn = BranchView(), None, 0.0
    # Warnings stay out of the drawing's way in a terminal, and go where stderr goes otherwise.
    shown = Live(view, console=console, auto_refresh=False, redirect_stderr=sys.stderr.isatty(), transient=not keep)
    with shown as live:
        for event in reasoner.stream(prompt, **settings):
            view.feed(event)
            if isinstance(event, Answer):
                result = event.result
            elif time.monotonic() - drawn >= REFRESH_S:
                live.refresh()
                drawn = time.monotonic()
    if result is None:
        raise EngineError("the run ended without an answer: run it again, and report it if it happens again")
    return result
