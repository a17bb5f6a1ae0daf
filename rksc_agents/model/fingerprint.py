"""What identifies a model, for certificates: its configuration and a sample of its weights."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

SAMPLED = 32
"""Values of each weight, evenly spaced."""

_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation"}


@torch.inference_mode()
def model_hash(model: PreTrainedModel) -> str:
    """Return 16 hexadecimal digits that change with the architecture and the weights, not with the name or dtype.

    A few values of every weight are looked at, before a reasoner packs them. Weights that are elsewhere (offloaded to a
    disk) count by their names.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        found.update(name.encode())
        if weight.device.type != "meta" and weight.numel():
            last = weight.numel() - 1
            places = [at * last // (SAMPLED - 1) for at in range(SAMPLED)]  # in whole numbers: floats would round up
            sample = weight.detach().flatten()[torch.tensor(places, device=weight.device)]
            found.update(sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]
