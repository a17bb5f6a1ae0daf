"""Loading of reward models: a model with a classification head, and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rksc_agents.errors import ConfigError, ModelLoadError
from rksc_agents.model.device import default_dtype
from rksc_agents.model.gguf import check_complete
from rksc_agents.model.source import HUB_ARGUMENTS, explained, resolve
from rksc_agents.verify.reward_text import Kind

_LOADERS: Mapping[str, Any] = MappingProxyType(
    {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
)
_HEADS: Mapping[str, Kind] = MappingProxyType(
    {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}
)


def head_of(model: PreTrainedModel) -> Kind:
    """Return which head a loaded model has.

    Raises
    ------
    ConfigError
        If it has neither.
    """
    names = [base.__name__ for base in type(model).__mro__]
    kinds = [kind for end, kind in _HEADS.items() if any(name.endswith(end) for name in names)]
    if not kinds:
        raise ConfigError(
            f"{names[0]} has no reward head: load it by AutoModelForSequenceClassification or "
            "AutoModelForTokenClassification"
        )
    return kinds[0]


def load_reward_model(
    model: str | Path, kind: str, place: torch.device, dtype: torch.dtype | str | None, given: Mapping[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model with a reward head, and its tokenizer.

    Parameters
    ----------
    model : str or Path
        A hub id or a local folder.
    kind : str
        "sequence", "token" or "auto".
    place : torch.device
        Where the model runs.
    dtype : torch.dtype or str or None
        None is float32 on the CPU, else what suits the device.
    given : mapping
        What the user gave for transformers' `from_pretrained`.

    Raises
    ------
    ConfigError
        If an argument is unknown or `kind` is none of them.
    ModelLoadError
        If the files are missing, damaged, or have no such head.
    UnsupportedModelError
        If transformers has no such head for the architecture.
    """
    if kind not in {"auto", *_LOADERS}:
        raise ConfigError(f"kind = {kind!r}: use 'auto', 'sequence' or 'token'")
    source = resolve(model, None, dict(given))
    if source.gguf is not None:
        raise ModelLoadError(f"{model} is a GGUF file, which holds no reward head: give a folder or a hub id")
    shared = {key: given[key] for key in (*HUB_ARGUMENTS, "trust_remote_code") if key in given}
    shared = {"trust_remote_code": False, **shared, **({"local_files_only": True} if source.local else {})}
    options = {"use_safetensors": True, **given, **shared}
    if dtype is None:
        dtype = torch.float32 if place.type == "cpu" else default_dtype(place)
    part = "config"
    try:
        if "config" not in options:
            options["config"] = AutoConfig.from_pretrained(source.place, **shared)
        head = _kind_of(options["config"].architectures or [], source.place) if kind == "auto" else kind
        part = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(source.place, **shared)
        part = "weights"
        loaded, info = _LOADERS[head].from_pretrained(source.place, dtype=dtype, output_loading_info=True, **options)
    except ModelLoadError:
        raise
    except Exception as error:
        raise explained(error, source, part, given=given) from error
    check_complete(info, source.place)
    if not (given.keys() & {"device_map", "quantization_config"} or getattr(loaded, "hf_quantizer", None)):
        loaded.to(place)  # elsewhere transformers has placed it
    return loaded.eval(), tokenizer


def _kind_of(architectures: Sequence[str], place: str) -> Kind:
    kinds = [kind for name in architectures for end, kind in _HEADS.items() if name.endswith(end)]
    if not kinds:
        raise ModelLoadError(
            f"the config of {place} names the architectures {', '.join(architectures) or 'none'}, and none has a "
            "reward head: use a model for sequence or token classification, or say kind='sequence' or kind='token' if "
            "its weights have one"
        )
    return kinds[0]
