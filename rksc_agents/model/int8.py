"""Linear layers in 8-bit integers on the CPU: a step reads a quarter of the bytes, at a loss that is measured.

Weights are rounded per output channel. Activations are rounded per token, twice: the remainder of the first rounding
goes through the same product as rows of its own, so that each weight is read once and nearly all that is lost is what
the weights' rounding loses (a tenth of what activations of 8 bits would lose). Sums are exact integers, so a row's
result depends on no other row of its batch. The ops are private to torch, so they are used behind a test of their
results.
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

_ops = torch.ops.onednn
_LARGEST = 127.0
_ZERO = 128
_FINER = 254.0  # a remainder is half a unit at most, and fills the range again


def int8_available() -> bool:
    """Whether this torch and CPU multiply 8-bit integers without overflow."""
    if not (hasattr(_ops, "qlinear_prepack") and hasattr(_ops, "qlinear_pointwise")):
        return False
    weight = torch.ones(16, 64)
    weight[1::2] = -1
    x = torch.ones(2, 64)
    x[1] = torch.linspace(-1, 1, 64)
    try:
        return torch.allclose(_product(weight, None)(x), nn.functional.linear(x, weight), rtol=0.02, atol=0.5)
    except RuntimeError:
        return False


@contextmanager
def int8_linears(model: PreTrainedModel, sample: Sequence[int]) -> Iterator[Quantization]:
    """Let the model's float32 CPU linear layers multiply in 8-bit integers for the length of the block.

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
        If the model has no such layers, or torch or the CPU lacks the ops.
    """
    layers = candidates(model)
    if not layers:
        raise ConfigError(
            f"EngineConfig.int8 = True: {type(model).__name__} has no float32 linear layers on the CPU; load it with "
            "dtype=torch.float32 and device='cpu', or leave int8 off"
        )
    if not int8_available():
        raise ConfigError(
            "EngineConfig.int8 = True: this torch or CPU has no exact products of 8-bit integers (AVX-512 VNNI or "
            "newer); leave int8 off"
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
    packed = _ops.qlinear_prepack((weight / scales[:, None]).round().to(torch.int8), None)
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    outputs = len(weight)

    def product(x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        largest = flat.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        scaled = flat * (_LARGEST / largest)
        coarse = scaled.round()
        fine = scaled.sub_(coarse).mul_(_FINER).round_()
        rounded = torch.cat([coarse, fine]).add_(_ZERO).to(torch.uint8)
        parts = _ops.qlinear_pointwise(
            rounded, 1 / _LARGEST, _ZERO, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        out = parts[: len(flat)].add_(parts[len(flat) :], alpha=1 / _FINER).mul_(largest)
        if bias is not None:
            out += bias
        return out.reshape(*x.shape[:-1], outputs)  # type: ignore[no-any-return]

    return product


@torch.inference_mode()
def _log_probs(model: PreTrainedModel, sample: Sequence[int]) -> Tensor:
    """Log-probabilities [tokens, vocabulary] of what follows each token."""
    logits = model(input_ids=torch.tensor([list(sample)]), use_cache=False).logits
    return logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]
