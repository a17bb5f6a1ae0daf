"""Byte accounting of the KV cache: what is held, what running work may still take, the limit."""

from __future__ import annotations


class Budget:
    """Bytes held against a limit.

    Counts KV tensors between steps exactly. Copies are made layer by layer, so a step may use one
    layer's worth of scratch memory beyond it, as it does for activations.

    Parameters
    ----------
    limit : int
        Bytes that may be held at most.

    Attributes
    ----------
    held : int
        Bytes of KV held now.
    peak : int
        Most bytes ever held.
    promised : int
        Bytes that running work may still take.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self.promised = 0

    def hold(self, nbytes: int) -> None:
        """Count `nbytes` as held."""
        self.held += nbytes
        self.peak = max(self.peak, self.held)

    def free(self, nbytes: int) -> None:
        """Count `nbytes` as returned."""
        assert 0 <= nbytes <= self.held, f"freed {nbytes} bytes of {self.held} held"
        self.held -= nbytes

    def promise(self, nbytes: int) -> None:
        """Set aside `nbytes` for work that is about to run."""
        self.promised += nbytes

    def settle(self, nbytes: int) -> None:
        """Take back a promise, because its bytes are now held or will not be needed."""
        assert 0 <= nbytes <= self.promised, f"settled {nbytes} bytes of {self.promised} promised"
        self.promised -= nbytes

    def missing(self, nbytes: int) -> int:
        """How many held bytes must go before `nbytes` more can be held; 0 if none."""
        return max(0, self.held + nbytes - self.limit)
