"""What was answered so far, in a file, so that a long comparison can go on after it was stopped."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rksc_agents.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Answered:
    """One question, answered in one way.

    Attributes
    ----------
    answer : str or None
        What was answered.
    right : bool
        Whether that is the known answer.
    tokens : int
        Tokens of all branches.
    seconds : float
        From the question to the answer.
    verified, exited : int
        Branches that were verified, and those of them whose verification stopped early.
    skipped : bool
        Whether verification was skipped.
    """

    answer: str | None
    right: bool
    tokens: int
    seconds: float
    verified: int
    exited: int
    skipped: bool


def key_of(**settings: Any) -> str:
    """A name for everything that an answer depends on."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


class Record:
    """Answers by key, kept in a file of JSON lines.

    Parameters
    ----------
    path : Path or None
        Read where it is there, and written to; None keeps nothing.

    Raises
    ------
    ConfigError
        If the file is none of these.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.known: dict[str, Answered] = {}
        if path is None or not path.exists():
            return
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read ({error}): give another file to resume from") from error
        for number, line in enumerate(lines, 1):
            if number == len(lines) and not line.endswith("\n"):  # it was being written when the run was stopped
                path.write_text("".join(lines[:-1]), encoding="utf-8")
                break
            try:
                row = json.loads(line)
                key = row.pop("key")
                self.known[key] = Answered(**row)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(
                    f"line {number} of {path} is no answer of this command ({error!r}): give another file to resume "
                    "from, or remove the line"
                ) from error

    def add(self, key: str, answered: Answered) -> None:
        """Keep an answer.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        self.known[key] = answered
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, **asdict(answered)}) + "\n")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written ({error}): give another file to resume from") from error
