"""Certificates as files: what is written is read, and what is wrong is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from pydantic import ValidationError

from rksc_agents.errors import ConfigError
from rksc_agents.model.converted import ConvertedCopies
from rksc_agents.verify.calibration import Point
from rksc_agents.verify.certificate import Certificate, Labelled, certificate_folder, plot, stored_path
from rksc_agents.verify.lens import FittedLens

LENS = FittedLens((10, 20), torch.tensor([[1.0, 0.5], [0.1, 2.0]]), torch.zeros(2), (0.5, 0.25), 2.0, 40)


def certificate(**changes: Any) -> Certificate:
    points = [
        Point(confidence=None, gap=0.0, margin=None, errors=0, risk=0.0, skip_rate=0.0, work_saved=0.0, accepted=True),
        Point(confidence=0.8, gap=0.1, margin=3.0, errors=2, risk=0.01, skip_rate=0.3, work_saved=0.4, accepted=True),
        Point(confidence=0.5, gap=0.0, margin=1.0, errors=30, risk=0.15, skip_rate=0.8, work_saved=0.9, accepted=False),
    ]
    fields: dict[str, Any] = {
        "model": "some_$model$_x",
        "model_hash": "abc123",
        "prompt_hash": "def456",
        "verifier": "self",
        "measure": "mean-top-probability",
        "strategy": {"name": "self-consistency", "branches": 8, "temperature": 0.7, "vote": None},
        "alpha": 0.05,
        "delta": 0.1,
        "n": 200,
        "errors": 2,
        "p_value": 0.0023,
        "confidence": 0.8,
        "gap": 0.1,
        "margin": 3.0,
        "lens": LENS.to_json(),
        "total_layers": 30,
        "skip_rate": 0.3,
        "risk_among_skipped": 0.02,
        "layers_saved": 0.2,
        "work_saved": 0.4,
        "curve": tuple(points),
        "created": "2026-01-02T03:04:05+00:00",
        "labelled": Labelled(questions=200, verifier_auc=0.52, accuracy={"majority": 0.4}, recommendation="none"),
    }
    return Certificate(**(fields | changes))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a" / "certificate.json"
    made = certificate()
    made.save(path)
    assert Certificate.load(path) == made
    assert Certificate.load(path).fitted_lens == LENS
    assert json.loads(path.read_text())["version"] == 1
    bare = certificate(lens=None, margin=None, confidence=None, risk_among_skipped=None, labelled=None, curve=())
    bare.save(path)  # replaces the older one
    assert Certificate.load(path) == bare
    assert bare.fitted_lens is None
    assert [file.name for file in path.parent.iterdir()] == ["certificate.json"]


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "certificate.json"
    certificate().save(path)
    before = path.read_text()

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=r"certificate\.json cannot be written .*No space left.*RKSC_CACHE"):
        certificate(n=5).save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("\udcff", "is not JSON"),
        ("[1]", "is no certificate"),
        ("{}", "is no certificate"),
        ({"version": 2}, "has version 2 and this package reads 1"),
        ({"surprise": 1}, r"surprise: Extra inputs"),
        ({"n": "many"}, r"n: Input should be"),
        ({"alpha": 1.0}, r"alpha: "),
        ({"lens": None}, r"margin = 3\.0 needs a lens"),
        ({"lens": {"layers": [1]}}, r"a lens has the fields"),
        ({"total_layers": 20}, r"reads layer 20 of a model of 20"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_way_out(tmp_path: Path, text: Any, says: str) -> None:
    path = tmp_path / "certificate.json"
    if isinstance(text, dict):
        certificate().save(path)
        text = json.dumps(json.loads(path.read_text()) | text)
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=says) as caught:
        Certificate.load(path)
    assert str(path) in str(caught.value)
    assert "rksc calibrate" in str(caught.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    certificate().save(path)
    found = json.loads(path.read_text())
    del found["measure"]
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="measure: Field required"):
        Certificate.load(path)


def test_a_certificate_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        certificate().alpha = 0.5  # type: ignore[misc]


def test_differences_are_named() -> None:
    made = certificate()
    same: dict[str, Any] = {
        "model_hash": "abc123",
        "prompt_hash": "def456",
        "measure": "mean-top-probability",
        "settings": dict(made.strategy),
    }
    assert made.differences(**same) == []
    assert made.differences(**same, verifier="self") == []
    (line,) = made.differences(**same | {"model_hash": "zzz"})
    assert "some_$model$_x" in line
    assert "abc123" in line
    assert "zzz" in line
    (line,) = made.differences(**same | {"prompt_hash": "zzz"})
    assert line.startswith("prompt")
    assert "def456" in line
    (line,) = made.differences(**same | {"measure": "self-certainty"})
    assert "'self-certainty'" in line
    (line,) = made.differences(**same, verifier="reward")
    assert "'reward'" in line
    settings = {"name": "self-consistency", "branches": 4, "temperature": 0.7, "top_p": 0.9}
    assert made.differences(**same | {"settings": settings}) == [
        "branches: certified for 8, in use is 4",
        "top_p: certified without it, in use is 0.9",
        "vote: certified for None, in use is none",
    ]


def test_certificates_lie_beside_the_converted_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RKSC_CACHE", str(tmp_path))
    assert certificate_folder() == tmp_path / "certificates"
    assert stored_path("abc", "def").parent == certificate_folder()
    assert len({stored_path("abc", "def"), stored_path("abc", "xyz"), stored_path("xyz", "def")}) == 3
    monkeypatch.delenv("RKSC_CACHE")
    assert certificate_folder().parent == ConvertedCopies().root.parent
    for bad in ("", "../up", "a/b"):
        with pytest.raises(ConfigError, match="hash"):
            stored_path("abc", bad)


def test_the_plot_shows_every_setting_and_alpha(tmp_path: Path) -> None:
    path = tmp_path / "curve.svg"
    plot(certificate(), path)
    root = ElementTree.fromstring(path.read_bytes())
    assert root.tag.endswith("svg")
    svg = "{http://www.w3.org/2000/svg}"
    marks = {group.get("id"): len(list(group.iter(f"{svg}use"))) for group in root.iter(f"{svg}g")}
    assert (marks["accepted"], marks["not accepted"], marks["chosen"]) == (2, 1, 1)
    for label in ("alpha = 5 %", "some_$model$_x, 200 problems"):
        assert f"<!-- {label} -->" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_the_plot_has_no_state_outside(tmp_path: Path) -> None:
    plot(certificate(curve=(), labelled=None), tmp_path / "curve.svg")
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'rksc-agents\[plot\]'"):
        plot(certificate(), tmp_path / "curve.svg")
    assert not list(tmp_path.iterdir())
