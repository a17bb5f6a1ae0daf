"""What identifies a model, for certificates: its configuration and a sample of its weights."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

_VOLATILE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation"}


@torch.inference_mode()
def model_hash(model: PreTrainedModel) -> str:
    """Return 16 hexadecimal digits that change with the architecture and the weights, not with the name or dtype.

    Looked at are the first tokens' embeddings and all one-dimensional weights (norms and biases), which neither
    packing nor quantization touches.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    samples = [weight[:64] for weight in model.parameters() if weight.dim() == 1]
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, torch.Tensor)
    for sample in [embeddings[:4].flatten(), *samples]:
        found.update(sample.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]
