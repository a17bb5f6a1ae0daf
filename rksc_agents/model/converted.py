"""Converted copies: a GGUF file unpacked once into safetensors, which loads in seconds.

A copy is a folder named by the SHA-256 of the GGUF file's content, its dtype and this module's format version. It is
written to a temporary folder beside it and renamed, so that it is there whole or not at all, and two processes that
convert at once both succeed. Hashing takes some 0.4 s per 100 MB and is done at each load: remembering
the hash by path, size and time would be faster for large files and wrong for a file that was replaced quietly.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from platformdirs import user_cache_path
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rksc_agents.errors import ConversionError, ModelLoadError
from rksc_agents.model.gguf import read_gguf

FORMAT = 1
"""Version of the copies; a change makes older copies unused."""

CACHE_VARIABLE = "RKSC_CACHE"
"""Environment variable that names another cache folder; the copies lie in its subfolder "converted"."""

MANIFEST = "rksc-copy.json"
_TEMPORARY = ".converting-"
_KEY = re.compile(r"[0-9a-f]{32}-\w+-v\d+")


@dataclass(frozen=True)
class ConvertedCopy:
    """One converted copy.

    Attributes
    ----------
    name : str
        File name of the GGUF file that it was made from, the folder's name where the copy does not tell.
    path : Path
        The copy's folder.
    bytes : int
        Its size on disk.
    created : datetime
        When it was made (UTC).
    """

    name: str
    path: Path
    bytes: int
    created: datetime


class ConvertedCopies:
    """The converted copies in one folder.

    Parameters
    ----------
    root : Path or str or None, default None
        The folder. None is the subfolder "converted" of the folder that the environment variable RKSC_CACHE names,
        or of the user's cache folder for this package.
    """

    def __init__(self, root: Path | str | None = None) -> None:
        if root is None:
            chosen = os.environ.get(CACHE_VARIABLE)
            root = (Path(chosen).expanduser() if chosen else user_cache_path("rksc-agents")) / "converted"
        self.root = Path(root)

    def entries(self) -> list[ConvertedCopy]:
        """Return the copies, ordered by name and folder."""
        return sorted((_describe(folder) for folder in self._folders(_KEY.fullmatch)), key=lambda e: (e.name, e.path))

    def clear(self) -> int:
        """Remove all copies and what interrupted conversions left; return the bytes freed.

        Other files in the folder stay. A conversion that runs meanwhile fails with :class:`ConversionError`.
        """
        freed = 0
        for folder in self._folders(lambda name: _KEY.fullmatch(name) or name.startswith(_TEMPORARY)):
            size = _size(folder)
            try:
                shutil.rmtree(folder)
            except OSError as error:
                raise ConversionError(f"could not remove {folder}: {error}; remove it by hand") from error
            freed += size
        return freed

    def get_or_convert(
        self, gguf: Path, *, dtype: torch.dtype | str, progress: Callable[[str], None] | None = None
    ) -> Path:
        """Return the folder with `gguf` as safetensors, tokenizer included, converting it where that is not there.

        Parameters
        ----------
        gguf : Path
            The GGUF file.
        dtype : torch.dtype or str
            The dtype of the copy's weights; "auto" is the file's own.
        progress : callable or None, default None
            Called with one line of text before a conversion.

        Raises
        ------
        ModelLoadError
            The file cannot be read as a GGUF model, or a package for that is missing.
        ConversionError
            The copy cannot be written; nothing half-written is left.
        """
        final = self.root / f"{_sha256(gguf)[:32]}-{str(dtype).removeprefix('torch.')}-v{FORMAT}"
        if final.exists():
            fault = _fault(final)
            if fault is None:
                return final
            warnings.warn(f"the converted copy {final} is broken ({fault}): converting again", stacklevel=3)
        if progress is not None:
            progress(f"converting {gguf.name} to a safetensors copy in {self.root} (once)")
        model, tokenizer = read_gguf(gguf, dtype)
        self._write(final, gguf, model, tokenizer)
        return final

    def _write(self, final: Path, gguf: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        # The tokenizer's files take some 70 bytes per token of its vocabulary.
        needed = sum(weight.nbytes for weight in model.parameters()) + 100 * len(tokenizer)
        temporary: Path | None = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(self.root).free) < needed:
                raise self._full(gguf, needed, free)
            temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.root))
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            _seal(temporary, gguf.name)
            _place(temporary, final)
        except (OSError, SafetensorError) as error:
            if _means_full(error):
                if temporary is not None:  # what it took is free again
                    shutil.rmtree(temporary, ignore_errors=True)
                raise self._full(gguf, needed, shutil.disk_usage(self.root).free) from error
            raise ConversionError(
                f"could not write the converted copy of {gguf} to {self.root}: {error}; "
                f"set {CACHE_VARIABLE} to a folder that can be written"
            ) from error
        finally:
            if temporary is not None:  # gone already where all went well
                shutil.rmtree(temporary, ignore_errors=True)

    def _full(self, gguf: Path, needed: int, free: int) -> ConversionError:
        return ConversionError(
            f"the converted copy of {gguf} needs {needed:,} bytes and {self.root} has {free:,} free: free "
            f"{max(needed - free, 1):,} bytes there, or set {CACHE_VARIABLE} to a folder on another disk"
        )

    def _folders(self, wanted: Callable[[str], object]) -> list[Path]:
        if not self.root.is_dir():
            return []
        return sorted(folder for folder in self.root.iterdir() if folder.is_dir() and wanted(folder.name))


def _seal(folder: Path, source: str) -> None:
    """Write the manifest, and all files through to the disk: a rename must not outlive what it points to."""
    files = {str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    manifest = {"source": source, "created": datetime.now(UTC).isoformat(timespec="seconds"), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    for name in (*files, MANIFEST):
        with (folder / name).open("rb+") as file:
            os.fsync(file.fileno())


def _place(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final`, unless another process has put a whole copy there."""
    if final.exists() and _fault(final) is not None:
        with contextlib.suppress(FileNotFoundError):  # another process may be at the same repair
            final.rename(temporary / "broken")
            shutil.rmtree(temporary / "broken")
    try:
        temporary.rename(final)
    except OSError:
        if _fault(final) is not None:
            raise


def _fault(folder: Path) -> str | None:
    """Return what is wrong with a copy, None for nothing."""
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, size in sizes.items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _describe(folder: Path) -> ConvertedCopy:
    created = datetime.fromtimestamp(int(folder.stat().st_mtime), UTC)
    name = folder.name
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        name, created = str(manifest["source"]), datetime.fromisoformat(manifest["created"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # a broken copy is listed by its folder
    return ConvertedCopy(name=name, path=folder, bytes=_size(folder), created=created)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _sha256(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read ({error}): check the path and its permissions") from error


def _means_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    return f"(os error {errno.ENOSPC})" in str(error)  # safetensors gives the number in its text only
