"""A file of JSON lines that survives its writer: a killed run goes on where it was, with nothing lost or doubled.

While a run goes on, its lines are in FILE.partial under a first line that says what the run is. Each line is on the
disk before the next is begun; one that was being written when the run was killed is dropped. At the end they get the
file's own name.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rksc_agents.errors import ConfigError
from rksc_agents.files import write_text


class Journal:
    """What a run has done so far; use it as a context manager.

    Parameters
    ----------
    out : Path
        The file that is to be written.
    identity : str
        What the run is: a file that was begun by another one is not gone on with.
    fresh : bool, default False
        Begin anew, whatever is there.

    Attributes
    ----------
    done : dict of int to str
        The lines so far by their number.

    Raises
    ------
    ConfigError
        If `out` is there already, was begun by another run, is written by one now, or cannot be written.
    """

    def __init__(self, out: Path, identity: str, *, fresh: bool = False) -> None:
        self.out = out
        self.partial = out.with_name(out.name + ".partial")
        self.done: dict[int, str] = {}
        self._head = json.dumps({"rksc_run": 1, "identity": identity})
        if out.exists() and not self.partial.exists() and not fresh:
            raise ConfigError(f"{out} is there already: give another file, or --fresh to replace it")
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.partial.open("a+b")
        except OSError as error:
            raise ConfigError(f"{self.partial} cannot be written ({error}): give another file") from error
        try:
            self._lock()
            self._begin(fresh)
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        if sys.platform == "win32":  # nothing keeps two runs from one file there
            return
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{self.partial} is being written by another run: wait for its end, or stop it"
            ) from error

    def _begin(self, fresh: bool) -> None:
        self._file.seek(0)
        lines = [] if fresh else self._file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            self._file.truncate(0)
            self._write(self._head)
            return
        if whole[0].decode("utf-8", "replace").strip() != self._head:
            raise ConfigError(
                f"{self.partial} was begun with another model, other questions or other settings: run it with those, "
                "give another file, or --fresh to begin anew"
            )
        for number, line in enumerate(whole[1:], 2):
            try:
                self.done[int(json.loads(line)["line"])] = line.decode("utf-8").rstrip("\n")
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"{self.partial}, line {number} is damaged: remove the line, or begin anew with --fresh"
                ) from error
        self._file.truncate(sum(map(len, whole)))

    def add(self, line: int, record: dict[str, Any]) -> None:
        """Keep the record of a line; it is on the disk when this returns.

        Raises
        ------
        ConfigError
            If it cannot be written, for example because the disk is full.
        """
        text = json.dumps({"line": line, **record}, ensure_ascii=False)
        self._write(text)
        self.done[line] = text

    def _write(self, text: str) -> None:
        try:
            self._file.write(text.encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise ConfigError(
                f"{self.partial} cannot be written ({error}): make room and run the same again; what was written counts"
            ) from error

    def finish(self) -> None:
        """Give the lines their own file, in their order."""
        write_text(self.out, "".join(f"{self.done[line]}\n" for line in sorted(self.done)))
        self.partial.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
