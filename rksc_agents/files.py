"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from rksc_agents.errors import ConfigError


def write_whole(path: str | Path, write: Callable[[Path], object], *, way_out: str = "give another path") -> None:
    """Write a file under a temporary name beside it, and give it its own name once it is on the disk.

    Parameters
    ----------
    path : str or Path
        Missing folders are made; a file that is there is replaced.
    write : callable
        Called with the temporary path.
    way_out : str
        What the user can do if it fails, for the error's message.

    Raises
    ------
    ConfigError
        If the file cannot be written; what was there is then as it was.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _beside(path) as temporary:
            write(temporary)
            with temporary.open("rb+") as file:  # a rename must not outlive what it points to
                os.fsync(file.fileno())
            temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}): {way_out}") from error


def write_text(path: str | Path, text: str, *, way_out: str = "give another path") -> None:
    """Write a text as UTF-8; see :func:`write_whole`."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline="\n"), way_out=way_out)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)  # gone already where all went well
