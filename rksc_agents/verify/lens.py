"""The fitted lens: what the last layer will say, predicted from a layer before it.

Reading the model's head early gives much the same word whatever the verdict will be. A ridge regression per layer, from
the normed hidden state to the log-odds at full depth, predicts the verdict; it needs no labels and has a closed form.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rksc_agents.errors import ConfigError

RIDGES = (3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Penalties that are tried where none is given."""

MIN_ROWS = 30
"""Verdicts a lens is fitted on at least."""

_FIELDS = {"layers", "width", "weights", "bias", "error", "scale", "fitted_on"}


@dataclass(frozen=True, eq=False, slots=True)
class FittedLens:
    """A linear readout per layer. Equal and hashed by content, so that rows with equal lenses can share a pass.

    Attributes
    ----------
    layers : tuple of int
        The layers it reads, counted from 1, ascending.
    weights : Tensor [layers, width], float32
        One readout per layer; the standardisation is folded in. Must not be changed.
    bias : Tensor [layers], float32
    error : tuple of float
        Per layer, the standard deviation of the held-out residual about zero, in units of log-odds.
    scale : float
        Standard deviation of the log-odds at full depth that it was fitted to.
    fitted_on : int
        Their number.
    digest : str
        SHA-256 of all of the above.
    """

    layers: tuple[int, ...]
    weights: Tensor
    bias: Tensor
    error: tuple[float, ...]
    scale: float
    fitted_on: int
    digest: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("weights", "bias"):  # copies, so that what the caller does to theirs is not seen here
            value = getattr(self, name).detach().to("cpu", torch.float32).clone(memory_format=torch.contiguous_format)
            object.__setattr__(self, name, value)
        _check_layers(self.layers)
        count = len(self.layers)
        if self.weights.dim() != 2 or len(self.weights) != count or self.bias.shape != (count,):
            raise ConfigError(
                f"a lens of {count} layers with weights {list(self.weights.shape)} and bias {list(self.bias.shape)}: "
                f"give [{count}, width] and [{count}]"
            )
        finite = bool(self.weights.isfinite().all() and self.bias.isfinite().all())
        if len(self.error) != count or not finite or not all(0.0 <= e < math.inf for e in (*self.error, self.scale)):
            raise ConfigError(
                f"a lens with error = {self.error!r}, scale = {self.scale!r}: give one error per layer, and only "
                "finite numbers, for errors and scale from 0"
            )
        object.__setattr__(
            self, "digest", hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
        )

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, FittedLens) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def predict(self, layer: int, hidden: Tensor) -> Tensor:
        """Return the log-odds of YES that are expected at full depth.

        Parameters
        ----------
        layer : int
            One of `layers`.
        hidden : Tensor [rows, width]
            Hidden states after that layer and the model's final norm.

        Returns
        -------
        Tensor [rows], float32
        """
        width = self.weights.shape[1]
        if layer not in self.layers or hidden.shape[-1] != width:
            raise ConfigError(
                f"layer {layer!r} with hidden states {list(hidden.shape)}: this lens reads layers "
                f"{', '.join(map(str, self.layers))} of a model {width} wide; calibrate with the model in use"
            )
        row = self.layers.index(layer)
        return hidden.float() @ self.weights[row].to(hidden.device) + self.bias[row].to(hidden.device)

    def to_json(self) -> dict[str, Any]:
        """Return the lens as JSON values; the weights are base64 of little-endian float32."""
        return {
            "layers": list(self.layers),
            "width": self.weights.shape[1],
            "weights": base64.b64encode(self.weights.numpy().astype("<f4").tobytes()).decode("ascii"),
            "bias": self.bias.tolist(),
            "error": list(self.error),
            "scale": self.scale,
            "fitted_on": self.fitted_on,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> FittedLens:
        """Return the lens that `to_json` gave.

        Raises
        ------
        ConfigError
            If a field is missing, unknown or of the wrong form.
        """
        if set(record) != _FIELDS:
            raise ConfigError(f"a lens has the fields {', '.join(sorted(_FIELDS))}, this one {', '.join(record)}")
        try:
            numbers = np.frombuffer(base64.b64decode(record["weights"], validate=True), dtype="<f4").astype(np.float32)
            return cls(
                layers=tuple(int(layer) for layer in record["layers"]),
                weights=torch.from_numpy(numbers.reshape(len(record["layers"]), int(record["width"]))),
                bias=torch.tensor(record["bias"], dtype=torch.float32),
                error=tuple(float(value) for value in record["error"]),
                scale=float(record["scale"]),
                fitted_on=int(record["fitted_on"]),
            )
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigError(f"the lens cannot be read ({error}): calibrate again") from error


def fit_lens(
    layers: Sequence[int],
    hidden: Tensor,
    log_odds: Tensor,
    ridge: float | None = None,
    groups: Sequence[int] | None = None,
) -> FittedLens:
    """Fit a lens to verdicts at full depth.

    Parameters
    ----------
    layers : sequence of int
        The layers of `hidden`, counted from 1, ascending.
    hidden : Tensor [rows, layers, width]
        Hidden states of the verdicts' tokens after the model's final norm.
    log_odds : Tensor [rows]
        Log-odds of YES at full depth.
    ridge : float or None, default None
        Penalty on the squared weights of standardised dimensions, above 0; None takes the one of ``RIDGES`` with the
        smallest held-out error, for each layer.
    groups : sequence of int or None, default None
        The problem that each row belongs to. Branches of one problem are alike, so a row's held-out prediction leaves
        out all of its problem; None leaves out the row alone.

    Raises
    ------
    ConfigError
        If there are fewer than ``MIN_ROWS`` rows, a value is not finite, or all log-odds are equal.
    """
    return cross_fit(layers, hidden, log_odds, ridge, groups)[0]


def cross_fit(
    layers: Sequence[int],
    hidden: Tensor,
    log_odds: Tensor,
    ridge: float | None = None,
    groups: Sequence[int] | None = None,
) -> tuple[FittedLens, Tensor]:
    """Fit a lens as `fit_lens` does, and say what a lens that had not seen a row would predict for it.

    Returns
    -------
    FittedLens
    Tensor [rows, layers], float64
        Held-out predictions.
    """
    layers = tuple(layers)
    _check_layers(layers)
    rows = len(log_odds)
    _check_data(len(layers), hidden, log_odds, ridge, groups)
    target = log_odds.detach().to("cpu", torch.float64)
    members = _members(groups)
    fits = [
        _fit(hidden[:, i].detach().to("cpu", torch.float64), target, RIDGES if ridge is None else (ridge,), members)
        for i in range(len(layers))
    ]
    lens = FittedLens(
        layers=layers,
        weights=torch.stack([fit.weights for fit in fits]),
        bias=torch.stack([fit.bias for fit in fits]),
        error=tuple(fit.error for fit in fits),
        scale=float(target.std(correction=0)),
        fitted_on=rows,
    )
    return lens, torch.stack([target - fit.residual for fit in fits], dim=1)


class _Fit(NamedTuple):
    weights: Tensor
    bias: Tensor
    residual: Tensor
    error: float


def _fit(x: Tensor, y: Tensor, ridges: Sequence[float], members: list[Tensor] | None) -> _Fit:
    """Ridge regression with a free intercept; `residual` is held out, exact up to the standardisation."""
    rows, width = x.shape
    mean, std = x.mean(0), x.std(0, correction=0)
    # A dimension that varies by rounding alone tells nothing.
    inverse = torch.where(std > 1e-6 * mean.abs() + 1e-12, 1.0 / std, 0.0)
    z, centred = (x - mean) * inverse, y - y.mean()
    if rows < width:
        values, basis = torch.linalg.eigh(z @ z.T)
        values = values.clamp(min=0.0)
    else:
        values, directions = torch.linalg.eigh(z.T @ z)
        kept = values > 1e-12 * values.max()
        values = torch.where(kept, values, 0.0)
        basis = (z @ directions) * torch.where(kept, values.rsqrt(), 0.0)
    along = basis.T @ centred

    def held_out(ridge: float) -> Tensor:
        shrink = values / (values + ridge)
        residual: Tensor = centred - basis @ (shrink * along)
        if members is None:
            leverage: Tensor = 1.0 / rows + basis.square() @ shrink
            return residual / (1.0 - leverage)
        result = torch.empty_like(residual)
        for rows_of in members:
            part = basis[rows_of]
            hat = (part * shrink) @ part.T + 1.0 / rows
            result[rows_of] = torch.linalg.solve(torch.eye(len(part), dtype=hat.dtype) - hat, residual[rows_of])
        return result

    residuals = [held_out(ridge) for ridge in ridges]
    errors = [float(residual.square().mean().sqrt()) for residual in residuals]
    best = min(range(len(ridges)), key=errors.__getitem__)
    weights = (z.T @ (basis @ (along / (values + ridges[best])))) * inverse
    return _Fit(weights, y.mean() - mean @ weights, residuals[best], errors[best])


def _members(groups: Sequence[int] | None) -> list[Tensor] | None:
    if groups is None:
        return None
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    return [torch.tensor(members) for members in rows.values()]


def _check_layers(layers: Sequence[int]) -> None:
    ascending = all(a < b for a, b in pairwise(layers))
    if not layers or layers[0] < 1 or not ascending:
        raise ConfigError(f"layers = {tuple(layers)!r} of a lens: give at least one, counted from 1, ascending")


def _check_data(
    layers: int, hidden: Tensor, log_odds: Tensor, ridge: float | None, groups: Sequence[int] | None
) -> None:
    rows = len(log_odds)
    if hidden.dim() != 3 or log_odds.dim() != 1 or hidden.shape[:2] != (rows, layers):
        raise ConfigError(
            f"hidden {list(hidden.shape)} and log_odds {list(log_odds.shape)} for {layers} layers: give "
            "[rows, layers, width] and [rows]"
        )
    if rows < MIN_ROWS:
        raise ConfigError(f"{rows} verdicts are too few to fit a lens: give more questions, for {MIN_ROWS} at least")
    if groups is not None and (len(groups) != rows or len(set(groups)) < 2):
        raise ConfigError(
            f"groups of {len(groups)} rows and {len(set(groups))} problems for {rows} verdicts: give the problem of "
            "each verdict, two problems at least"
        )
    if ridge is not None and not 0.0 < ridge < math.inf:
        raise ConfigError(f"ridge = {ridge!r}: give a finite number above 0, or None to have one chosen")
    if not (bool(hidden.isfinite().all()) and bool(log_odds.isfinite().all())):
        raise ConfigError("hidden states or log-odds hold NaN or infinity: run the model in float32 or bfloat16")
    if float(log_odds.double().std(correction=0)) <= 1e-6 * (1.0 + float(log_odds.double().mean().abs())):
        raise ConfigError(
            "the log-odds of all verdicts are equal, so there is nothing to predict: give questions that differ, or "
            "another verifier"
        )
