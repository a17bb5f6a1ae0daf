"""What one request took, counted while it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rksc_agents.cache.tree import Node
from rksc_agents.engine.cursor import Cursor
from rksc_agents.types import KVUsage


@dataclass(slots=True, eq=False)
class Ledger:
    """Tokens, bytes and seconds of one request.

    Attributes
    ----------
    prompt_tokens, prompt_tokens_reused : int
        Tokens that prefills asked for, and how many of them the tree had.
    kv : KVUsage
        Peaks so far.
    """

    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    prefill_s: float = 0.0
    decode_s: float = 0.0
    verify_s: float = 0.0
    prompt_tokens: int = 0
    prompt_tokens_reused: int = 0
    completion_tokens: int = 0
    probe_tokens: int = 0
    kv: KVUsage = field(default_factory=KVUsage)
    recomputed: int = 0
    cursors: set[Cursor] = field(default_factory=set)
    """What the request has claimed and not released."""

    def start(self) -> None:
        """Note the first step that worked for this request."""
        if self.started is None:
            self.started = time.perf_counter()

    def finished(self) -> list[Node]:
        """The ends of branches that are done and still claimed."""
        return [cursor.node for cursor in self.cursors if cursor.depth and cursor.node.alive]

    def saw(self, held: int, copied: int, shared: int) -> None:
        """Note the bytes held now, the bytes that copies would take, and the tokens shared; the peak is kept."""
        if held > self.kv.peak_bytes:
            self.kv = KVUsage(peak_bytes=held, bytes_if_copied=copied, tokens_shared=shared)
