"""The certificate: what calibration found, for which model, prompt and settings, as a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from platformdirs import user_cache_path
from pydantic import Field, ValidationError, model_validator

from rksc_agents.errors import ConfigError
from rksc_agents.files import write_text, write_whole
from rksc_agents.model.converted import CACHE_VARIABLE
from rksc_agents.types import Record
from rksc_agents.verify.calibration import Point
from rksc_agents.verify.lens import FittedLens

_WAY_OUT = f"give another path, or set {CACHE_VARIABLE} to a folder that can be written"

VERSION: Literal[1] = 1
"""Version of the files; others are refused."""

_HASH = re.compile(r"[0-9A-Za-z_-]{1,100}")

Value = str | bool | int | float | None


class Labelled(Record):
    """What labelled questions add to a certificate.

    Attributes
    ----------
    questions : int
        With a label.
    verifier_auc : float or None
        Probability that the verifier scores a right branch above a wrong one; 0.5 is a coin flip. None where all
        branches are right or all wrong.
    accuracy : dict
        Share of right answers under each vote rule.
    recommendation : str
        What to set, and why.
    """

    questions: int = Field(ge=0)
    verifier_auc: float | None = None
    accuracy: dict[str, float] = Field(default_factory=dict)
    recommendation: str = ""


class Certificate(Record):
    """A promise on early exit: with probability 1 - delta, at most a share alpha of decisions differs.

    It holds for questions like those it was made with, for one model, prompt and set of settings.

    Attributes
    ----------
    version : int
        Of the file's form.
    model, model_hash, prompt_hash : str
        The model's name, and what identifies it and the prompts of question and verifier.
    verifier, measure : str
        Names of the verifier and of the confidence measure.
    strategy : dict
        Settings of the strategy.
    alpha, delta : float
        Risk that is allowed and probability that the promise fails.
    n, errors, p_value
        Problems of the test, decisions among them that differed, and P(Bin(n, alpha) <= errors).
    confidence, gap, margin
        The thresholds; a confidence or margin of None switches that level off.
    lens : dict or None
        The fitted lens as JSON values; see `fitted_lens`.
    total_layers : int
        Layers of the model.
    skip_rate, risk_among_skipped, layers_saved, work_saved
        As in :class:`~rksc_agents.verify.calibration.Certified`.
    curve : tuple of Point
        All settings that were tried, strict to loose.
    created : str
        Date and time, ISO 8601.
    labelled : Labelled or None
        Where questions had labels.

    Examples
    --------
    >>> reasoner.reason("Q", exit=Certificate.load("certificate.json"))  # doctest: +SKIP
    """

    version: Literal[1] = VERSION
    model: str
    model_hash: str
    prompt_hash: str
    verifier: str
    measure: str
    strategy: dict[str, Value] = Field(default_factory=dict)
    alpha: float = Field(gt=0.0, lt=1.0)
    delta: float = Field(gt=0.0, lt=1.0)
    n: int = Field(ge=0)
    errors: int = Field(ge=0)
    p_value: float = Field(ge=0.0, le=1.0)
    confidence: float | None = Field(default=None, allow_inf_nan=False)
    gap: float = Field(default=0.0, allow_inf_nan=False)
    margin: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    lens: dict[str, Any] | None = None
    total_layers: int = Field(ge=1)
    skip_rate: float = Field(ge=0.0, le=1.0)
    risk_among_skipped: float | None = Field(default=None, ge=0.0, le=1.0)
    layers_saved: float = Field(ge=0.0, le=1.0)
    work_saved: float = Field(ge=0.0, le=1.0)
    curve: tuple[Point, ...] = ()
    created: str
    labelled: Labelled | None = None

    @model_validator(mode="after")
    def _check_lens(self) -> Self:
        lens = self.fitted_lens  # a broken lens is told here, not in the middle of a run
        if lens is None and self.margin is not None:
            raise ValueError(f"margin = {self.margin!r} needs a lens")
        if lens is not None and lens.layers[-1] >= self.total_layers:
            raise ValueError(f"the lens reads layer {lens.layers[-1]} of a model of {self.total_layers}")
        return self

    @property
    def fitted_lens(self) -> FittedLens | None:
        """The lens, read anew at each call; None without one."""
        return None if self.lens is None else FittedLens.from_json(self.lens)

    def save(self, path: Path | str) -> None:
        """Write the certificate; the file is there whole or not at all.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        text = self.model_dump_json(indent=2)
        write_text(path, text + "\n", way_out=_WAY_OUT)

    @classmethod
    def load(cls, path: Path | str) -> Certificate:
        """Read a certificate.

        Raises
        ------
        ConfigError
            If the file is missing, is no certificate, or one of another version.
        """
        again = "make it anew with `rksc calibrate`"
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"the certificate {path} cannot be read ({error}): check the path, or {again}") from error
        except ValueError as error:
            raise ConfigError(f"the certificate {path} is not JSON ({error}): {again}") from error
        if not isinstance(found, dict) or "version" not in found:
            raise ConfigError(f"{path} is no certificate, which is a JSON object with a version: {again}")
        if found["version"] != VERSION:
            raise ConfigError(
                f"the certificate {path} has version {found['version']!r} and this package reads {VERSION}: {again}"
            )
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)
            )
            raise ConfigError(f"the certificate {path} is broken ({faults}): {again}") from error

    def differences(
        self,
        *,
        model_hash: str,
        prompt_hash: str,
        measure: str,
        settings: Mapping[str, Value],
        verifier: str | None = None,
    ) -> list[str]:
        """Return what differs from what is in use, one line each; nothing where the promise holds.

        Parameters
        ----------
        model_hash, prompt_hash, measure
            What is in use.
        settings : mapping
            Settings of the strategy in use.
        verifier : str or None, default None
            Name of the verifier in use; None is not compared.
        """
        lines = []
        if model_hash != self.model_hash:
            lines.append(f"model: certified for {self.model} ({self.model_hash}), in use is {model_hash}")
        if prompt_hash != self.prompt_hash:
            lines.append(f"prompt: certified for {self.prompt_hash}, in use is {prompt_hash}")
        if measure != self.measure:
            lines.append(f"confidence measure: certified for {self.measure!r}, in use is {measure!r}")
        if verifier is not None and verifier != self.verifier:
            lines.append(f"verifier: certified for {self.verifier!r}, in use is {verifier!r}")
        for name in sorted({*self.strategy, *settings}):
            if name not in settings:
                lines.append(f"{name}: certified for {self.strategy[name]!r}, in use is none")
            elif name not in self.strategy:
                lines.append(f"{name}: certified without it, in use is {settings[name]!r}")
            elif self.strategy[name] != settings[name]:
                lines.append(f"{name}: certified for {self.strategy[name]!r}, in use is {settings[name]!r}")
        return lines


def certificate_folder() -> Path:
    """Return the folder of certificates: "certificates" in the folder named by RKSC_CACHE, or in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return (Path(chosen).expanduser() if chosen else user_cache_path("rksc-agents")) / "certificates"


def stored_path(model_hash: str, prompt_hash: str) -> Path:
    """Return where the certificate for a model and prompt is looked for."""
    for value in (model_hash, prompt_hash):
        if not _HASH.fullmatch(value):  # it becomes part of a file's name
            raise ConfigError(
                f"hash = {value!r}: give 1 to 100 letters, digits, '-' or '_', such as a hexadecimal digest"
            )
    return certificate_folder() / f"{model_hash}-{prompt_hash}.json"


def plot(certificate: Certificate, path: Path | str) -> None:
    """Draw risk against work saved as an SVG file.

    Raises
    ------
    ConfigError
        If matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "drawing a certificate needs matplotlib: install the extra `plot` (pip install 'rksc-agents[plot]')"
        ) from error
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    for accepted, label in ((True, "accepted"), (False, "not accepted")):
        points = [point for point in certificate.curve if point.accepted == accepted]
        if points:
            axes.plot(
                [100 * point.work_saved for point in points],
                [100 * point.risk for point in points],
                marker="o",
                linestyle="none",
                color="tab:blue",
                markerfacecolor="tab:blue" if accepted else "none",
                label=label,
                gid=label,
            )
    risk = certificate.errors / certificate.n if certificate.n else 0.0
    axes.plot(
        [100 * certificate.work_saved],
        [100 * risk],
        "o",
        ms=12,
        mfc="none",
        mec="tab:red",
        label="chosen",
        gid="chosen",
    )
    axes.axhline(100 * certificate.alpha, color="gray", linestyle="--", label=f"alpha = {100 * certificate.alpha:g} %")
    axes.set_xlabel("verification saved, % of layers")
    axes.set_ylabel("decisions that differ, %")
    axes.set_title(f"{certificate.model}, {certificate.n} problems", parse_math=False)
    axes.legend()
    write_whole(path, lambda temporary: figure.savefig(temporary, format="svg"), way_out=_WAY_OUT)
