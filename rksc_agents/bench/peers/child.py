"""A program in another environment that answers JSON lines with JSON lines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rksc_agents.bench.peers.system import MissingSystemError
from rksc_agents.errors import EngineError

_PATIENCE_S = 20.0  # for a program that was told to end
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def program(path: str | None, what: str, variable: str) -> str:
    """The full path of a program.

    Raises
    ------
    MissingSystemError
        If none is given, or it is not there.
    """
    if not path:
        raise MissingSystemError(f"{what} is not set up here: set {variable} to its path")
    found = shutil.which(os.path.expanduser(path))
    if found is None:
        raise MissingSystemError(f"{variable} = {path!r} is no program that can be run: set it to the path of {what}")
    return found


def environment(**more: str) -> dict[str, str]:
    """The environment without what is meant for this Python, and with what is not set in it yet."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    return {**more, **kept}


class Process:
    """A running program whose error output is kept for messages.

    Parameters
    ----------
    command : sequence of str
        What is run.
    name : str
        What it is called in messages.
    env : mapping
        Its environment.
    piped : bool, default False
        Whether its standard input and output are pipes.
    """

    def __init__(self, command: Sequence[str], name: str, env: Mapping[str, str], *, piped: bool = False) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the program
        try:
            self._run = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else self._errors,
                stderr=self._errors,
                env=dict(env),
                text=piped,
                encoding="utf-8" if piped else None,
            )
        except OSError as error:
            self._errors.close()
            raise MissingSystemError(f"{name} cannot be started ({error}): check the path") from error

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._run.poll() is not None

    def said(self) -> str:
        """The last line that it wrote to its error output."""
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else "it wrote nothing"

    def close(self) -> None:
        """End it. Closing twice does nothing."""
        if self._errors.closed:
            return
        if self._run.stdin is not None:
            with suppress(BrokenPipeError):  # it may have ended already, with a message unread
                self._run.stdin.close()
        else:
            self._run.terminate()
        try:
            self._run.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._run.kill()
            self._run.wait()
        if self._run.stdout is not None:
            self._run.stdout.close()
        self._errors.close()


class Child(Process):
    """A program that answers each line of JSON on its standard input with one on its standard output.

    An answer with "error" is raised. The program ends when its input does.
    """

    def __init__(self, command: Sequence[str], name: str, env: Mapping[str, str]) -> None:
        super().__init__(command, name, env, piped=True)

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and wait for its answer.

        Raises
        ------
        EngineError
            If the program ended, answered something else than an object, or answered with "error".
        """
        assert self._run.stdin is not None and self._run.stdout is not None
        try:
            self._run.stdin.write(json.dumps(message) + "\n")
            self._run.stdin.flush()
            line = self._run.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._run.wait()
            raise EngineError(f"{self.name} ended with code {self._run.returncode}: {self.said()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EngineError(f"{self.name} answered {line[:200]!r}, which is no JSON object")
        if "error" in answer:
            raise EngineError(f"{self.name} failed: {answer['error']}")
        return answer
