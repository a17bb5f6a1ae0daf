"""What this machine offers: device, dtype, memory, and the features a run depends on."""

from __future__ import annotations

import importlib.util
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rksc_agents.errors import ConfigError
from rksc_agents.model.converted import ConvertedCopies
from rksc_agents.model.gguf import bundled_gguf
from rksc_agents.model.linear import packing_available
from rksc_agents.model.partial import HAS_FLASH

EXTRAS = ("gguf", "accelerate")
"""Optional packages whose presence `doctor` reports."""


def default_device() -> torch.device:
    """Return "cuda" where a CUDA (or ROCm) device is present, else "cpu". Apple's "mps" is used only when asked for."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device | str) -> torch.dtype:
    """Return the dtype in which a model runs best on `device`.

    CUDA: bfloat16 where the hardware has it, else float16. CPU: bfloat16 only where the CPU has AMX tiles for it,
    since without them 16-bit prefill is slower than float32, also with AVX512-BF16. Anything else: float32.
    """
    kind = torch.device(device).type
    if kind == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if kind == "cpu" and cpu_has_amx():
        return torch.bfloat16
    return torch.float32


def cpu_has_amx() -> bool:
    """Return whether the CPU multiplies bfloat16 matrices in AMX tiles."""
    report = getattr(torch.cpu, "get_capabilities", None)
    if report is not None:
        return bool(report().get("amx_bf16", False))
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)  # torch before 2.12 has no public question
    return bool(probe()) if probe is not None else False


def checked_device(device: torch.device | str | None) -> torch.device:
    """Return `device` as a `torch.device`, the default one for None.

    Raises
    ------
    ConfigError
        The name is not a device, or this machine has no such device.
    """
    if device is None:
        return default_device()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device = {device!r} is no device: use 'cpu', 'cuda', 'cuda:0' or 'mps'") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device = {str(found)!r}, and torch sees {torch.cuda.device_count()} CUDA devices: use 'cpu', or install "
            "a CUDA build of torch and the driver"
        )
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("device = 'mps', which torch does not see on this machine: use 'cpu'")
    return found


def memory_bytes(device: torch.device | str) -> tuple[int, int] | None:
    """Return the total and the free bytes of the memory `device` computes in; None where nothing tells.

    Host memory counts what the system could hand out at once, and no more than the container may use.
    """
    place = torch.device(device)
    if place.type == "cuda":
        free, total = torch.cuda.mem_get_info(place)
        return int(total), int(free)
    host = _host_memory()
    if host is None:
        return None
    total, free = host
    limit, used = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None and limit < total:
        total, free = limit, min(free, max(0, limit - (used or 0)))
    return total, free


def attention_path(device: torch.device | str) -> str:
    """Return "flash-cpu" where torch has its flash kernel for the CPU (with log-sum-exp), else "plain"."""
    return "flash-cpu" if torch.device(device).type == "cpu" and HAS_FLASH else "plain"


def doctor(
    *, device: torch.device | str | None = None, attention: str | None = None, copies: ConvertedCopies | None = None
) -> dict[str, Any]:
    """Report, as JSON-able values, what a model would run on here.

    Parameters
    ----------
    device : torch.device or str or None, default None
        Where the model would run; None is the default device.
    attention : str or None, default None
        The attention path as the runner names it; None asks :func:`attention_path`.
    copies : ConvertedCopies or None, default None
        The converted copies to count; None is those in the user's cache folder.

    Raises
    ------
    ConfigError
        `device` is not there.
    """
    place = checked_device(device)
    copies = copies if copies is not None else ConvertedCopies()
    kept = copies.entries()
    memory = memory_bytes(place)
    bundled = bundled_gguf()
    packages = ("rksc-agents", "torch", "transformers")
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in packages}},
        "device": str(place),
        "device_name": torch.cuda.get_device_name(place) if place.type == "cuda" else platform.machine(),
        "dtype": str(default_dtype(place)).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_amx": cpu_has_amx(),
        "memory": {"total_bytes": memory[0], "free_bytes": memory[1]} if memory is not None else None,
        "attention": attention if attention is not None else attention_path(place),
        "prepacked_linears": packing_available(),
        "extras": {name: importlib.util.find_spec(name) is not None for name in EXTRAS},
        "default_model": str(bundled) if bundled is not None else None,
        "cache": {"path": str(copies.root), "copies": len(kept), "bytes": sum(copy.bytes for copy in kept)},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _host_memory() -> tuple[int, int] | None:
    try:
        pairs = (line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
        sizes = {name: int(value.split()[0]) * 1024 for name, value in pairs}
        return sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError, ValueError):
        pass
    try:  # macOS tells the total only: half of it is a cautious guess at what is free
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total // 2
    except (AttributeError, OSError, ValueError):
        return None


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text("ascii"))
    except (OSError, ValueError):  # no such file, or "max"
        return None


def kv_limit(budget: int | float | None, device: torch.device) -> int:
    """The KV budget in bytes: as given, as a share of the free memory of `device`, or a quarter of it."""
    if isinstance(budget, int):
        return budget
    memory = memory_bytes(device)
    if memory is None and budget is None:
        return 2 * 2**30
    if memory is None:
        raise ConfigError(
            f"the free memory of {device} cannot be read, so a share of it means nothing: "
            "give EngineConfig.kv_budget in bytes"
        )
    return int(memory[1] * (0.25 if budget is None else budget))
