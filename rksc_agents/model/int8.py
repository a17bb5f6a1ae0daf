"""Linear layers with weights in 8-bit integers on the CPU: a step of few rows reads a quarter of the bytes.

Weights are rounded per output channel. For a few rows they are multiplied as they are, with activations in bfloat16 (a
relative rounding, row by row, so a row's result depends on no other row of its batch); for more rows, as in a prompt,
the rounded weight is written out as float32 first. What both ways lose together is measured on a text when the model is
loaded. The op is private to torch, so it is used behind a test of its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rksc_agents.errors import ConfigError
from rksc_agents.model.linear import candidates, override
from rksc_agents.types import Quantization

PASSAGE = (
    "Mrs Holt sells honey at the market in the town of Ash. On Friday she brought 24 jars and sold a third of them "
    "before noon, each for 5 crowns. In the afternoon it rained, so she sold only 4 more, and took the rest home. How "
    "much did she earn, and how many jars were left? Before noon she sold 24 / 3 = 8 jars. With the 4 jars of the "
    "afternoon these are 8 + 4 = 12 jars, which brought 12 * 5 = 60 crowns. So 24 - 12 = 12 jars were left."
)
"""Text on which the loss is measured."""

FEW = 48
"""Rows that are multiplied with the integers; beyond, writing a weight out costs less than what it spares."""

_LARGEST = 127.0
_BLOCK = 32  # the op reads past the end of a row whose width is no multiple of its vectors


def int8_available() -> bool:
    """Whether this torch multiplies with weights of 8-bit integers."""
    if not hasattr(torch, "_weight_int8pack_mm"):
        return False
    weight = torch.linspace(-1, 1, 16 * 64).view(16, 64)
    x = torch.linspace(-1, 1, 2 * 64).view(2, 64)
    try:
        return torch.allclose(_product(weight, None)(x), nn.functional.linear(x, weight), rtol=0.02, atol=0.2)
    except RuntimeError:
        return False


@contextmanager
def int8_linears(model: PreTrainedModel, sample: Sequence[int]) -> Iterator[Quantization]:
    """Let the model's float32 CPU linear layers multiply with 8-bit weights for the length of the block.

    The plain weights stay where they are, so memory grows by a quarter of theirs and nothing is lost at the end.

    Parameters
    ----------
    model : PreTrainedModel
    sample : sequence of int
        Tokens on which the loss is measured, at least one.

    Yields
    ------
    Quantization
        What was quantized, and how far the model's distributions on `sample` moved by it.

    Raises
    ------
    ConfigError
        If the model has no such layers, or torch lacks the op.
    """
    layers = candidates(model)
    if not layers:
        raise ConfigError(
            f"EngineConfig.int8 = True: {type(model).__name__} has no float32 linear layers on the CPU; load it with "
            "dtype=torch.float32 and device='cpu', or leave int8 off"
        )
    if not int8_available():
        raise ConfigError(
            "EngineConfig.int8 = True: this torch does not multiply with weights of 8-bit integers; leave int8 off"
        )
    plain = _log_probs(model, sample)
    with ExitStack() as undo:
        for layer in layers.values():
            undo.callback(override(layer, _product(layer.weight.detach(), layer.bias)))
        rounded = _log_probs(model, sample)
        yield Quantization(
            layers=len(layers),
            divergence=float((plain.exp() * (plain - rounded)).sum(-1).mean().clamp_min(0.0)),
            agreement=float((plain.argmax(-1) == rounded.argmax(-1)).float().mean()),
        )


@torch.no_grad()
def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The linear map of a weight [out, in], rounded to 8 bits."""
    scales = weight.abs().amax(1).clamp_min(1e-30) / _LARGEST
    integers = (weight / scales[:, None]).round().to(torch.int8)
    few = FEW if weight.shape[1] % _BLOCK == 0 else 0
    units = torch.ones(len(weight), dtype=torch.bfloat16)  # the op's scales have 8 bits: ours are multiplied after it

    def product(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) > few:
            return nn.functional.linear(x, integers * scales[:, None], bias)
        out = torch._weight_int8pack_mm(flat.to(torch.bfloat16), integers, units) * scales
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], len(integers))

    return product


@torch.inference_mode()
def _log_probs(model: PreTrainedModel, sample: Sequence[int]) -> Tensor:
    """Log-probabilities [tokens, vocabulary] of what follows each token, in passes of few rows that stand alone."""
    passes = [model(input_ids=piece, use_cache=False).logits for piece in torch.tensor([list(sample)]).split(FEW, 1)]
    return torch.cat([logits[0].float().log_softmax(-1) for logits in passes])
