"""Loading: from whatever names a model to the model and its tokenizer, ready to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from rksc_agents.config import DEFAULT_MODEL
from rksc_agents.errors import ConfigError, ModelLoadError
from rksc_agents.model.converted import ConvertedCopies
from rksc_agents.model.device import checked_device, default_dtype
from rksc_agents.model.gguf import check_complete, read_gguf
from rksc_agents.model.source import HUB_ARGUMENTS, Source, explained, resolve

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_RESERVED = {
    "torch_dtype": "use dtype",
    "output_loading_info": "load_model reads it itself and raises where weights are missing",
    "return_unused_kwargs": "unknown arguments raise",
}


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer.

    Attributes
    ----------
    model : PreTrainedModel
        In evaluation mode, on its device.
    tokenizer : PreTrainedTokenizerBase
        With the model's chat template where it has one.
    name : str
        What the user asked for.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str


def load_model(
    model: str | Path = DEFAULT_MODEL,
    *,
    gguf_file: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device | None = None,
    progress: Callable[[str], None] | None = None,
    **hf_kwargs: Any,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Parameters
    ----------
    model : str or Path, default "smollm2-135m-instruct"
        A hub id, a local folder, a GGUF file, or the alias of the default model. A GGUF file is unpacked once into
        a converted copy in the user's cache folder (:class:`~rksc_agents.model.converted.ConvertedCopies`).
    gguf_file : str or None, default None
        The GGUF file inside the folder or hub repository `model`.
    dtype : torch.dtype or str or None, default None
        The weights' dtype; "auto" is that of the files, None the one that suits the device
        (:func:`~rksc_agents.model.device.default_dtype`).
    device : str or torch.device or None, default None
        Where the model runs; None is CUDA where present, else the CPU. Not with `device_map` or
        `quantization_config`: such a model stays where transformers puts it.
    progress : callable or None, default None
        Called with one line of text before each long step.
    **hf_kwargs
        Passed on to `from_pretrained`: `device_map`, `quantization_config`, `attn_implementation`, `revision`,
        `token`, `subfolder`, `trust_remote_code` (default False), `use_safetensors` (default True) and so on.

    Returns
    -------
    LoadedModel

    Raises
    ------
    ConfigError
        An argument is unknown, outside its range, or contradicts another.
    ModelLoadError
        The files are missing, damaged or unsuitable.
    ConversionError
        The converted copy of a GGUF file cannot be written.
    UnsupportedModelError
        The architecture is unknown or does not generate text.
    """
    name = str(model)
    placed = _check_arguments(hf_kwargs, device)
    target = checked_device(device)
    weights_dtype = _checked_dtype(dtype, target)
    source = resolve(model, gguf_file, hf_kwargs)
    if source.gguf is None:
        loaded, tokenizer = _from_pretrained(source, name, weights_dtype, hf_kwargs, progress)
    else:
        # These say where the GGUF file is, and it is found; its copy is a local folder of its own.
        rest = {key: value for key, value in hf_kwargs.items() if key not in HUB_ARGUMENTS}
        if getattr(hf_kwargs.get("quantization_config"), "quant_method", None) == "gguf":
            loaded, tokenizer = read_gguf(source.gguf, weights_dtype, **rest)  # its blocks are to stay packed
        else:
            folder = ConvertedCopies().get_or_convert(source.gguf, dtype=weights_dtype, progress=progress)
            loaded, tokenizer = _from_pretrained(Source(str(folder), True), name, weights_dtype, rest, progress)
    if not placed and not _is_placed(loaded):
        try:
            loaded.to(target)  # type: ignore[arg-type]
        except torch.OutOfMemoryError as error:
            size = sum(weight.nbytes for weight in loaded.parameters())
            raise ModelLoadError(
                f"{name} has {size:,} bytes in {loaded.dtype} and does not fit on {target}: use a smaller dtype, "
                "quantization_config, device_map='auto', device='cpu' or a smaller model"
            ) from error
    loaded.eval()
    return LoadedModel(model=loaded, tokenizer=tokenizer, name=name)


def _check_arguments(hf_kwargs: dict[str, Any], device: str | torch.device | None) -> bool:
    """Return whether transformers places the model."""
    for name, way_out in _RESERVED.items():
        if name in hf_kwargs:
            raise ConfigError(f"{name} is no argument of load_model: {way_out}")
    placing = [name for name in ("device_map", "quantization_config") if hf_kwargs.get(name) is not None]
    if placing and device is not None:
        raise ConfigError(
            f"device = {str(device)!r} with {placing[0]}: such a model is not moved after loading; leave device out, "
            "and choose the place by device_map"
        )
    return bool(placing)


def _checked_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype | str:
    if dtype is None:
        return default_dtype(device)
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found in _DTYPES:
        return found
    if dtype == "auto":
        return dtype
    raise ConfigError(
        f"dtype = {dtype!r} is none that a model runs in: use 'float32', 'bfloat16', 'float16', 'float64' or 'auto'"
    )


def _is_placed(model: PreTrainedModel) -> bool:
    """Return whether a model is dispatched, or quantized (also by its own files): neither may be moved."""
    quantized = getattr(model, "hf_quantizer", None) or getattr(model.config, "quantization_config", None)
    return bool(getattr(model, "hf_device_map", None) or quantized)


def _from_pretrained(
    source: Source,
    name: str,
    dtype: torch.dtype | str,
    hf_kwargs: dict[str, Any],
    progress: Callable[[str], None] | None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options = {"trust_remote_code": False, "use_safetensors": True, **hf_kwargs}
    if source.local:
        options["local_files_only"] = True  # whatever the folder refers to, the network is not asked
    if progress is not None:
        progress(f"loading {name}" if source.local else f"loading {name} (from the hub where it is not cached)")
    for_tokenizer = {key: options[key] for key in (*HUB_ARGUMENTS, "trust_remote_code") if key in options}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.place, **for_tokenizer)
    except Exception as error:
        raise explained(error, source, "tokenizer") from error
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source.place, dtype=dtype, output_loading_info=True, **options
        )
    except Exception as error:
        raise explained(error, source, "weights", given=hf_kwargs) from error
    model, info = loaded
    check_complete(info, source.place)
    return model, tokenizer
