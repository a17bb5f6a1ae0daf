"""What the model's head makes of a hidden state: for the last layer, and as a lens for those before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rksc_agents.errors import UnsupportedModelError
from rksc_agents.model.exits import Watch


class Settled(Exception):  # noqa: N818 - no error: the verdict is there
    """Ends a pass before the last layer; carries the layer and the target logits there."""

    def __init__(self, layer: int, logits: Tensor) -> None:
        super().__init__(layer)
        self.layer = layer
        self.logits = logits


class Readout:
    """The model's decoder layers, its final norm, and its head for chosen tokens.

    Which module is the final norm, and how logits are scaled and capped after the head, is found by comparing with a
    pass of the model, so that no table of architectures is needed.

    Attributes
    ----------
    layers : sequence of nn.Module
        The decoder layers in order.
    """

    def __init__(self, layers: Sequence[nn.Module], norm: nn.Module, head: nn.Module, scale: float, cap: float) -> None:
        self.layers = layers
        self._norm = norm
        self._head = head
        self._scale = scale
        self._cap = cap

    def hidden(self, raw: Tensor) -> Tensor:
        """Apply the final norm to a layer's output; shape kept."""
        where = next(self._norm.parameters(), raw)
        normed: Tensor = self._norm(raw.to(where.device))
        return normed

    def logits(self, hidden: Tensor, targets: Sequence[int]) -> Tensor:
        """Logits [rows, targets] in float32 of normed hidden states [rows, width], for the target tokens only."""
        weight = self._head.weight
        assert isinstance(weight, Tensor)
        if weight.dim() == 2 and weight.shape[1] == hidden.shape[1] and weight.is_floating_point():
            bias = getattr(self._head, "bias", None)
            rows = torch.tensor(targets, device=weight.device)
            picked = weight[rows].to(hidden.dtype)
            found = nn.functional.linear(hidden.to(weight.device), picked, None if bias is None else bias[rows])
        else:  # packed or quantized: its rows cannot be picked
            found = self._head(hidden)[:, list(targets)]
        found = found.float() * self._scale
        return self._cap * torch.tanh(found / self._cap) if self._cap else found

    @contextmanager
    def watched(self, watch: Watch, last: LastTokens, targets: Sequence[int]) -> Iterator[None]:
        """Let `watch` look after its layers while the block runs the model.

        Raises
        ------
        Settled
            Inside the model's pass, when the watch ends it.
        """
        handles = []

        def look(layer: int, output: object) -> None:
            raw = output[0] if isinstance(output, tuple) else output
            assert isinstance(raw, Tensor)
            glimpse = _Glimpse(self, last(raw), targets)
            if watch.look(layer, glimpse):
                raise Settled(layer, glimpse.logits)

        try:
            for layer in sorted(watch.layers):
                if not 0 < layer <= len(self.layers):
                    raise UnsupportedModelError(
                        f"layer {layer} cannot be looked at: this model has layers 1 to {len(self.layers)}"
                    )
                module = self.layers[layer - 1]
                handles.append(module.register_forward_hook(lambda _m, _i, out, n=layer: look(n, out)))
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Glimpse:
    def __init__(self, readout: Readout, state: Tensor, targets: Sequence[int]) -> None:
        self._readout = readout
        self._state = state
        self._targets = targets

    @property
    def raw(self) -> Tensor:
        return self._state.float()

    @cached_property
    def _normed(self) -> Tensor:
        return self._readout.hidden(self._state)

    @property
    def hidden(self) -> Tensor:
        return self._normed.float()

    @cached_property
    def logits(self) -> Tensor:
        return self._readout.logits(self._normed, self._targets)


class LastTokens:
    """Picks the rows' last tokens out of a layer's output: of the flat layout by index, of a batch its last column."""

    def __init__(self, flat: Sequence[int] | None) -> None:
        self._flat = flat

    def __call__(self, raw: Tensor) -> Tensor:
        if self._flat is None:
            return raw[:, -1]
        return raw[0, torch.tensor(self._flat, device=raw.device)]


@contextmanager
def measured(model: PreTrainedModel) -> Iterator[list[Readout]]:
    """Find the readout of `model` from the pass that the block makes; the list is filled when the block ends.

    It stays empty where no final norm and head explain the model's logits.
    """
    layers = _decoder_layers(model)
    head = model.get_output_embeddings()
    seen: dict[str, Tensor] = {}
    found: list[Readout] = []

    def note(name: str, value: object) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        if isinstance(tensor, Tensor):
            seen[name] = tensor.detach()

    handles = [
        head.register_forward_pre_hook(lambda _m, args: note("normed", args)),
        model.register_forward_hook(lambda _m, _i, out: note("logits", out.logits)),
    ]
    if layers is not None:
        handles.append(layers[1][-1].register_forward_hook(lambda _m, _i, out: note("raw", out)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    if layers is not None and seen.keys() == {"normed", "logits", "raw"} and bool(seen["raw"].any()):
        found += _explained(model, layers[0], list(layers[1]), seen)


def _decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList] | None:
    """The module that holds the decoder layers, and these."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    return None


@torch.inference_mode()
def _explained(
    model: PreTrainedModel, holder: nn.Module, layers: list[nn.Module], seen: dict[str, Tensor]
) -> Iterator[Readout]:
    raw, normed, logits = seen["raw"], seen["normed"], seen["logits"].float()
    cap = float(getattr(model.config.get_text_config(), "final_logit_softcapping", None) or 0.0)
    for norm in [*(child for child in holder.children() if not isinstance(child, nn.ModuleList)), nn.Identity()]:
        try:
            same = torch.equal(norm(raw), normed) or torch.allclose(norm(raw), normed, rtol=1e-3, atol=1e-3)
        except Exception:  # a module of another kind, such as an embedding
            continue
        if not same:
            continue
        plain = model.get_output_embeddings()(normed).float()
        uncapped = cap * torch.atanh((logits / cap).clamp(-1 + 1e-6, 1 - 1e-6)) if cap else logits
        scale = float((uncapped * plain).sum() / plain.square().sum().clamp_min(1e-12))
        made = Readout(layers, norm, model.get_output_embeddings(), scale, cap)
        again = plain * scale
        again = cap * torch.tanh(again / cap) if cap else again
        if torch.allclose(again, logits, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
            yield made
            return
