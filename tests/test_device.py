"""Choice of device and dtype, and the report on the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from rksc_agents.errors import ConfigError
from rksc_agents.model import device as device_module
from rksc_agents.model.converted import ConvertedCopies
from rksc_agents.model.device import (
    attention_path,
    checked_device,
    cpu_has_amx,
    default_device,
    default_dtype,
    doctor,
    memory_bytes,
)
from rksc_agents.model.linear import packing_available


@pytest.mark.parametrize(("present", "expected"), [(True, "cuda"), (False, "cpu")])
def test_the_default_device_is_cuda_where_present(
    monkeypatch: pytest.MonkeyPatch, present: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert default_device() == torch.device(expected)
    assert checked_device(None) == torch.device(expected)


@pytest.mark.parametrize(
    ("device", "amx", "cuda_bf16", "expected"),
    [
        ("cpu", False, True, torch.float32),
        ("cpu", True, False, torch.bfloat16),
        ("cuda", False, True, torch.bfloat16),
        ("cuda:1", True, False, torch.float16),
        ("mps", True, True, torch.float32),
    ],
)
def test_the_dtype_follows_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, amx: bool, cuda_bf16: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(device_module, "cpu_has_amx", lambda: amx)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: cuda_bf16)
    assert default_dtype(torch.device(device)) == expected


@pytest.mark.parametrize("has_amx", [True, False])
def test_amx_is_asked_by_the_public_report_and_without_it_by_the_probe(
    monkeypatch: pytest.MonkeyPatch, has_amx: bool
) -> None:
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_amx, "avx512_bf16": True}, raising=False
    )
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: not has_amx, raising=False)
    assert cpu_has_amx() is has_amx
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert cpu_has_amx() is not has_amx
    monkeypatch.delattr(torch.cpu, "_is_amx_tile_supported")
    assert cpu_has_amx() is False


@pytest.mark.parametrize("name", ["gpu", "cpu:x", ""])
def test_a_name_that_is_no_device_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is no device: use 'cpu', 'cuda'"):
        checked_device(name)


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert checked_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"'cuda:1', and torch sees 1 CUDA"):
        checked_device("cuda:1")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="'mps', which torch does not see"):
        checked_device(torch.device("mps"))


def test_host_memory_is_what_the_system_could_give(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal:  1000 kB\nMemFree:  1 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, encoding: _read(files, str(self)))
    assert memory_bytes("cpu") == (1_024_000, 614_400)
    files |= {"/sys/fs/cgroup/memory.max": "500000\n", "/sys/fs/cgroup/memory.current": "100000\n"}
    assert memory_bytes("cpu") == (500_000, 400_000)
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory_bytes("cpu") == (1_024_000, 614_400)
    del files["/proc/meminfo"]
    sizes = {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert memory_bytes("cpu") == (40_960, 20_480)
    monkeypatch.delattr(os, "sysconf")
    assert memory_bytes("cpu") is None


def _read(files: dict[str, str], name: str) -> str:
    if name not in files:
        raise FileNotFoundError(name)
    return files[name]


def test_cuda_memory_is_the_devices_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 8))
    assert memory_bytes("cuda") == (8, 3)


def test_features_are_looked_for_where_torch_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_path("cpu") == "flash-cpu"
    assert attention_path("cuda") == "plain"
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert packing_available() is hasattr(torch.ops.mkldnn, "_linear_pointwise")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packing_available() is False


def test_doctor_reports_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "cpu_has_amx", lambda: False)
    monkeypatch.setattr(device_module, "bundled_gguf", lambda: None)
    found = doctor(device="cpu", copies=ConvertedCopies(tmp_path / "copies"))
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["torch"] == torch.__version__
    assert set(found["versions"]) == {"python", "rksc-agents", "torch", "transformers"}
    assert (found["device"], found["dtype"], found["attention"]) == ("cpu", "float32", "flash-cpu")
    assert found["threads"] == torch.get_num_threads()
    assert 0 < found["memory"]["free_bytes"] <= found["memory"]["total_bytes"]
    assert set(found["extras"]) == {"gguf", "accelerate"}
    assert found["default_model"] is None
    assert found["cache"] == {"path": str(tmp_path / "copies"), "copies": 0, "bytes": 0}


def test_doctor_takes_the_attention_path_and_finds_the_default_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "bundled_gguf", lambda: tmp_path / "x.gguf")
    found = doctor(device="cpu", attention="plain", copies=ConvertedCopies(tmp_path))
    assert (found["attention"], found["default_model"]) == ("plain", str(tmp_path / "x.gguf"))
    with pytest.raises(ConfigError, match="is no device"):
        doctor(device="tpu!")
