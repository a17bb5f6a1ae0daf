"""Converted copies of GGUF files: whole or not there, keyed by content, listed and cleared."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_gguf import CHAT_TEMPLATE, HIDDEN, VOCABULARY, write_gguf
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from rksc_agents.errors import ConversionError, ModelLoadError
from rksc_agents.model import converted
from rksc_agents.model import gguf as gguf_module
from rksc_agents.model.converted import ConvertedCopies

FP32 = torch.float32


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def copies(tmp_path: Path) -> ConvertedCopies:
    return ConvertedCopies(tmp_path / "cache" / "converted")


def names(copies: ConvertedCopies) -> list[str]:
    return sorted(path.name for path in copies.root.iterdir()) if copies.root.exists() else []


def test_a_copy_holds_the_models_weights_tokenizer_and_chat_template(gguf: Path, copies: ConvertedCopies) -> None:
    folder = copies.get_or_convert(gguf, dtype=FP32)
    weights = load_file(folder / "model.safetensors")
    expected = np.random.default_rng(0).standard_normal((len(VOCABULARY), HIDDEN)).astype(np.float32)
    assert np.array_equal(weights["model.embed_tokens.weight"].numpy(), expected)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    ids = tokenizer("abcd é<|im_end|>")["input_ids"]
    assert ids[0] == VOCABULARY.index("abc")
    assert ids[-1] == VOCABULARY.index("<|im_end|>") == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abcd é"
    model = LlamaForCausalLM.from_pretrained(folder)
    assert getattr(model.config, "quantization_config", None) is None
    model.save_pretrained(folder.parent / "again")  # a model read from GGUF would refuse


def test_a_copy_comes_from_the_named_file_and_from_nothing_else(
    gguf: Path, copies: ConvertedCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoy = tmp_path / "here"
    decoy.mkdir()
    write_gguf(decoy / gguf.name, seed=1)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")  # nor from what lies beside the file
    monkeypatch.chdir(decoy)
    folder = copies.get_or_convert(Path("..") / gguf.name, dtype=FP32)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(VOCABULARY)
    weights = load_file(folder / "model.safetensors")
    assert weights["model.embed_tokens.weight"][0, 0] == pytest.approx(np.random.default_rng(0).standard_normal())


def test_a_file_is_converted_once_whatever_its_name(
    gguf: Path, copies: ConvertedCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    folder = copies.get_or_convert(gguf, dtype=FP32, progress=said.append)
    assert said == [f"converting tiny.gguf to a safetensors copy in {copies.root} (once)"]
    other = shutil.copy(gguf, tmp_path / "other.gguf")
    monkeypatch.setattr(converted, "read_gguf", None)  # a second conversion would raise
    assert copies.get_or_convert(Path(other), dtype=FP32, progress=said.append) == folder
    assert len(said) == 1
    assert folder.name == f"{hashlib.sha256(gguf.read_bytes()).hexdigest()[:32]}-float32-v{converted.FORMAT}"


def test_content_dtype_and_format_each_make_another_copy(
    gguf: Path, copies: ConvertedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = copies.get_or_convert(gguf, dtype=FP32)
    half = copies.get_or_convert(gguf, dtype=torch.bfloat16)
    assert load_file(half / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert load_file(copies.get_or_convert(gguf, dtype="auto") / "model.safetensors")["model.norm.weight"].dtype == FP32
    write_gguf(gguf, seed=1)  # same path, same size, other weights
    second = copies.get_or_convert(gguf, dtype=FP32)
    monkeypatch.setattr(converted, "FORMAT", converted.FORMAT + 1)
    third = copies.get_or_convert(gguf, dtype=FP32)
    assert len({first, half, second, third}) == 4
    assert len(copies.entries()) == 5


@pytest.mark.parametrize("damage", ["truncated", "deleted", "no manifest", "bad manifest"])
def test_a_broken_copy_is_said_and_converted_again(gguf: Path, copies: ConvertedCopies, damage: str) -> None:
    folder = copies.get_or_convert(gguf, dtype=FP32)
    before = (folder / "model.safetensors").read_bytes()
    weights, manifest = folder / "model.safetensors", folder / converted.MANIFEST
    if damage == "truncated":
        weights.write_bytes(before[:-1])
    elif damage == "deleted":
        (folder / "tokenizer.json").unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text("[]")
    with pytest.warns(UserWarning, match=r"is broken \(.*\): converting again"):
        assert copies.get_or_convert(gguf, dtype=FP32) == folder
    assert weights.read_bytes() == before
    assert (folder / "tokenizer.json").exists()
    assert names(copies) == [folder.name]
    assert copies.get_or_convert(gguf, dtype=FP32) == folder  # whole again: no warning, which would be an error


@pytest.mark.parametrize("broken_before", [False, True])
@pytest.mark.filterwarnings("ignore:the converted copy:UserWarning")
def test_two_conversions_at_once_both_succeed(
    gguf: Path, copies: ConvertedCopies, monkeypatch: pytest.MonkeyPatch, broken_before: bool
) -> None:
    if broken_before:
        (copies.get_or_convert(gguf, dtype=FP32) / "model.safetensors").write_bytes(b"")
    barrier, lock, original = threading.Barrier(2), threading.Lock(), converted.read_gguf

    def read(*args: Any) -> Any:
        with lock:
            result = original(*args)
        barrier.wait(timeout=60)  # neither writes before both have found no copy
        return result

    monkeypatch.setattr(converted, "read_gguf", read)
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(copies.get_or_convert(gguf, dtype=FP32))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 2
    assert folders[0] == folders[1]
    assert names(copies) == [folders[0].name]
    LlamaForCausalLM.from_pretrained(folders[0])


def test_a_disk_too_small_is_refused_before_anything_is_written(
    gguf: Path, copies: ConvertedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = (261 * 32 + 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32)) * 4
    needed += 100 * len(VOCABULARY)  # the tokenizer, estimated
    usage = shutil.disk_usage(gguf.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000))
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", None)
    with pytest.raises(ConversionError, match=r"RKSC_CACHE") as caught:
        copies.get_or_convert(gguf, dtype=FP32)
    text = str(caught.value)
    assert f"needs {needed:,} bytes" in text
    assert "has 1,000 free" in text
    assert f"free {needed - 1_000:,} bytes there" in text
    assert str(gguf) in text
    assert names(copies) == []


@pytest.mark.parametrize(
    ("error", "pattern"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"needs [\d,]+ bytes and .* has [\d,]+ free"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), r"needs [\d,]+ bytes and .* has [\d,]+ free"),
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            r"needs [\d,]+ bytes and .* has [\d,]+ free",
        ),
        (OSError(errno.EROFS, "Read-only file system"), "could not write .* Read-only file system"),
        (SafetensorError("something else"), "could not write .* something else"),
    ],
)
def test_an_error_while_writing_leaves_nothing(
    gguf: Path, copies: ConvertedCopies, monkeypatch: pytest.MonkeyPatch, error: Exception, pattern: str
) -> None:
    def fail(self: PreTrainedModel, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)
    with pytest.raises(ConversionError, match=pattern) as caught:
        copies.get_or_convert(gguf, dtype=FP32)
    assert caught.value.__cause__ is error
    assert "RKSC_CACHE" in str(caught.value)
    assert names(copies) == []


def test_an_interrupt_while_writing_leaves_nothing(
    gguf: Path, copies: ConvertedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: PreTrainedModel, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        copies.get_or_convert(gguf, dtype=FP32)
    assert names(copies) == []


def test_a_cache_folder_that_cannot_be_made_is_named(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConversionError, match=r"could not write .*file/converted.*RKSC_CACHE"):
        ConvertedCopies(tmp_path / "file" / "converted").get_or_convert(gguf, dtype=FP32)


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.5, 0.999])
def test_a_truncated_gguf_is_named(gguf: Path, copies: ConvertedCopies, kept: float) -> None:
    content = gguf.read_bytes()
    gguf.write_bytes(content[: max(8, int(len(content) * kept))])
    with pytest.raises(
        ModelLoadError, match=r"tiny\.gguf cannot be read as a GGUF model .*download it again"
    ) as caught:
        copies.get_or_convert(gguf, dtype=FP32)
    assert caught.value.__cause__ is not None
    assert names(copies) == []


def test_a_gguf_that_lacks_a_tensor_is_refused(tmp_path: Path, copies: ConvertedCopies) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", skip="blk.1.attn_q")
    with pytest.raises(ModelLoadError, match=r"lack 1 of the model's weights \(model\.layers\.1\.self_attn\.q_proj"):
        copies.get_or_convert(gguf, dtype=FP32)
    assert names(copies) == []


def test_an_unknown_architecture_is_named(tmp_path: Path, copies: ConvertedCopies) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", architecture="nonsense")
    with pytest.raises(ModelLoadError, match=r"nonsense.*load the model's safetensors instead"):
        copies.get_or_convert(gguf, dtype=FP32)


def test_the_record_of_packing_is_removed_where_transformers_cannot_be_told_to_unpack(
    gguf: Path, copies: ConvertedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_module, "transformers", SimpleNamespace())  # without GgufConfig, as older releases are
    model, _ = gguf_module.read_gguf(gguf, FP32)
    assert not hasattr(model.config, "quantization_config")
    model.save_pretrained(copies.root)


def test_a_copy_is_unpacked_also_where_transformers_could_keep_the_blocks(
    gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    original = gguf_module.AutoModelForCausalLM.from_pretrained

    def spy(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["quantization_config"].dequantize)
        return original(*args, **kwargs)

    monkeypatch.setattr(gguf_module.AutoModelForCausalLM, "from_pretrained", spy)
    gguf_module.read_gguf(gguf, FP32)
    assert asked == [True]


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_names_the_extra(
    gguf: Path, copies: ConvertedCopies, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else original(name))
    with pytest.raises(ModelLoadError, match=rf"needs {package}: pip install 'rksc-agents\[gguf\]'"):
        copies.get_or_convert(gguf, dtype=FP32)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, copies: ConvertedCopies) -> None:
    with pytest.raises(ModelLoadError, match=r"missing\.gguf cannot be read"):
        copies.get_or_convert(tmp_path / "missing.gguf", dtype=FP32)


def test_entries_tell_name_path_bytes_and_time(gguf: Path, copies: ConvertedCopies, tmp_path: Path) -> None:
    assert copies.entries() == []
    folder = copies.get_or_convert(write_gguf(tmp_path / "b.gguf", seed=1), dtype=FP32)
    copies.get_or_convert(shutil.copy(gguf, tmp_path / "a.gguf"), dtype=FP32)
    first, second = copies.entries()
    assert (first.name, second.name) == ("a.gguf", "b.gguf")
    assert second.path == folder
    assert second.bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert timedelta(0) <= datetime.now(UTC) - second.created < timedelta(hours=1)
    (folder / converted.MANIFEST).write_text("not json")
    assert [entry.name for entry in copies.entries()] == sorted([folder.name, "a.gguf"])


def test_clear_frees_copies_and_leftovers_and_nothing_else(gguf: Path, copies: ConvertedCopies) -> None:
    assert copies.clear() == 0
    copies.get_or_convert(gguf, dtype=FP32)
    leftover = copies.root / ".converting-abc"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"x" * 1_000)
    (copies.root / "mine").mkdir()
    (copies.root / "mine.txt").touch()
    expected = copies.entries()[0].bytes + 1_000
    assert copies.clear() == expected
    assert names(copies) == ["mine", "mine.txt"]
    assert copies.entries() == []


def test_clear_names_what_it_could_not_remove(
    gguf: Path, copies: ConvertedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copies.get_or_convert(gguf, dtype=FP32)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(ConversionError, match=f"could not remove {folder}"):
        copies.clear()


def test_the_root_is_the_users_cache_folder_unless_the_environment_or_the_caller_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(converted, "user_cache_path", lambda app: Path(os.environ["XDG_CACHE_HOME"]) / app)
    monkeypatch.delenv("RKSC_CACHE", raising=False)
    assert ConvertedCopies().root == tmp_path / "xdg" / "rksc-agents" / "converted"
    monkeypatch.setenv("RKSC_CACHE", str(tmp_path / "mine"))
    assert ConvertedCopies().root == tmp_path / "mine" / "converted"
    assert ConvertedCopies(tmp_path / "given").root == tmp_path / "given"
    monkeypatch.setenv("RKSC_CACHE", "~/here")
    assert ConvertedCopies().root == Path.home() / "here" / "converted"
