"""What one client may take, and how many may wait."""

from __future__ import annotations

from pydantic import Field

from rksc_agents.config import Config
from rksc_agents.errors import ConfigError


class Limits(Config):
    """Limits of a server.

    Parameters
    ----------
    body_bytes : int, default 1 MiB
        Of a request's body.
    max_tokens : int, default 4096
        Tokens of a branch that a client may ask for.
    default_tokens : int, default 512
        Where it does not say.
    branches : int, default 64
        Branches of a request.
    in_flight : int, default 256
        Requests that run or wait; one more is answered with 429.
    timeout_s : float, default 600
        Seconds that a request may take.
    traces : int, default 64
        Last runs whose page is kept.
    """

    body_bytes: int = Field(default=2**20, ge=1024)
    max_tokens: int = Field(default=4096, ge=1)
    default_tokens: int = Field(default=512, ge=1)
    branches: int = Field(default=64, ge=1)
    in_flight: int = Field(default=256, ge=1)
    timeout_s: float = Field(default=600.0, gt=0)
    traces: int = Field(default=64, ge=0)

    def check_tokens(self, wanted: int | None) -> int:
        """The tokens of a branch, within the limit."""
        if wanted is None:
            return min(self.default_tokens, self.max_tokens)
        if wanted > self.max_tokens:
            raise ConfigError(f"max_tokens = {wanted}: this server writes at most {self.max_tokens}")
        return wanted

    def check_branches(self, wanted: int) -> None:
        """Refuse more branches than there may be."""
        if wanted > self.branches:
            raise ConfigError(f"{wanted} branches: this server reasons with at most {self.branches}")


class BusyError(Exception):
    """There are as many requests as there may be."""


class Door:
    """Counts the requests inside."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.inside = 0

    def enter(self) -> None:
        """Be counted.

        Raises
        ------
        BusyError
            If there is no room.
        """
        if self.inside >= self.most:
            raise BusyError
        self.inside += 1

    def leave(self) -> None:
        """Be counted no more."""
        self.inside -= 1
