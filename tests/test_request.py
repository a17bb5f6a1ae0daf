"""What a call may set, and which certificate holds for it."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from rksc_agents import (
    BestOfN,
    Certificate,
    CertificateWarning,
    ConfigError,
    ExitConfig,
    JudgeVerifier,
    RKSCReasoner,
    Sampling,
    SelfConsistency,
    calibrate,
)
from rksc_agents.testing import scripted_reasoner, scripted_tokenizer
from rksc_agents.verify.certificate import stored_path
from rksc_agents.verify.lens import FittedLens

SAMPLING = Sampling(temperature=1.0, max_tokens=4)
STRATEGY = BestOfN(score="verifier", branches=3)
QUESTIONS = [f"{random.Random(i).randrange(99)} and {i}?" for i in range(40)]


def made(seed: int = 0, **changes: Any) -> RKSCReasoner:
    torch.manual_seed(seed)
    tokenizer = scripted_tokenizer()
    model = tiny_model("Llama", vocab_size=len(tokenizer), num_hidden_layers=4, max_position_embeddings=1024, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed * 0.01)
    return RKSCReasoner.from_model(model, tokenizer, sampling=SAMPLING)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RKSC_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def certificate(cache: Path) -> Certificate:
    with made() as reasoner:
        return calibrate(reasoner, QUESTIONS, strategy=STRATEGY, alpha=0.5, save=cache / "mine.json").certificate


def test_without_a_certificate_the_gate_is_strict_and_no_layer_is_left(cache: Path) -> None:
    with made() as reasoner:
        result = reasoner.reason("Why?", strategy=STRATEGY)
    assert result.verification.exit == "strict"
    assert result.verification.exited == 0


def test_a_certificate_in_the_cache_folder_is_found(certificate: Certificate, cache: Path) -> None:
    loose = certificate.model_copy(update={"confidence": 0.0, "gap": 0.0})
    loose.save(stored_path(loose.model_hash, loose.prompt_hash))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with made() as reasoner:
            found = reasoner.reason("Why?", strategy=STRATEGY)
            off = reasoner.reason("Why?", strategy=STRATEGY, exit="off")
    assert (found.verification.exit, found.verification.skipped) == ("certificate", 3)
    assert (off.verification.exit, off.verification.skipped, off.verification.verified) == ("off", 0, 3)


def test_it_is_not_taken_for_another_verifier_or_another_model(certificate: Certificate) -> None:
    certificate.save(stored_path(certificate.model_hash, certificate.prompt_hash))
    judged = BestOfN(score="verifier", branches=3, verifier=JudgeVerifier())
    with made() as reasoner:
        assert reasoner.reason("Why?", strategy=judged).verification.exit == "strict"
    with made(seed=1) as other:
        assert other.reason("Why?", strategy=STRATEGY).verification.exit == "strict"


def test_given_by_path_it_warns_where_the_model_differs(certificate: Certificate, cache: Path) -> None:
    with made(seed=1) as reasoner, pytest.warns(CertificateWarning, match="model: certified for"):
        result = reasoner.reason("Why?", strategy=STRATEGY, exit=cache / "mine.json")
    assert result.verification.exit == "certificate"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"strategy": BestOfN(score="verifier", branches=2)}, "branches"),
        ({"strategy": SelfConsistency(vote="verifier", branches=3)}, "strategy"),
        ({"strategy": BestOfN(score="verifier", branches=3, verifier=JudgeVerifier())}, "verifier"),
        ({"strategy": BestOfN(score="verifier", branches=3, confidence="mean-log-probability")}, "measure"),
    ],
)
def test_it_warns_where_settings_differ(
    certificate: Certificate, cache: Path, options: dict[str, Any], said: str
) -> None:
    exits = ExitConfig.from_certificate(cache / "mine.json")
    with made() as reasoner, pytest.warns(CertificateWarning, match=said):
        reasoner.reason("Why?", **{"strategy": STRATEGY, "exit": exits, **options})


def test_it_does_not_warn_where_all_is_as_certified(certificate: Certificate) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with made() as reasoner:
            reasoner.reason("Why?", strategy=STRATEGY, exit=certificate)


def test_the_model_hash_is_of_the_weights_not_of_the_name() -> None:
    with made() as one, made() as same, made(seed=1) as other:
        assert one.model_hash == same.model_hash != other.model_hash


def test_the_certificates_lens_ends_passes(certificate: Certificate) -> None:
    sure = FittedLens((2, 3), torch.zeros(2, 32), torch.full((2,), 1000.0), (1.0, 1.0), 1.0, 30)
    loose = certificate.model_copy(update={"confidence": None, "margin": 1.0, "lens": sure.to_json()})
    with made() as reasoner:
        result = reasoner.reason("Why?", strategy=STRATEGY, exit=loose)
    assert [branch.verdict.exit_layer for branch in result.branches if branch.verdict] == [2] * 3
    assert result.verification.layers == 6 < result.verification.layers_full == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exit": "lenient"}, "exit = 'lenient'"),
        ({"exit": "missing.json"}, "cannot be read"),
        ({"sharing": "wild"}, "Sharing.mode"),
        ({"phrasings": "one text"}, "phrasings"),
        ({"warmth": 1}, "warmth"),
        ({"strategy": "magic"}, "strategy = 'magic'"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    with scripted_reasoner({"Q": "A"}) as reasoner, pytest.raises(ConfigError, match=message):
        reasoner.reason("Q", **options)


def test_one_changed_weight_matrix_changes_the_hash() -> None:
    """A merged adapter changes nothing but these."""
    tokenizer = scripted_tokenizer()
    hashes = set()
    for changed in (False, True):
        model = tiny_model("Llama", vocab_size=len(tokenizer))
        if changed:
            with torch.no_grad():
                model.model.layers[1].mlp.down_proj.weight.add_(0.01)
        with RKSCReasoner.from_model(model, tokenizer) as reasoner:
            hashes.add(reasoner.model_hash)
    assert len(hashes) == 2


def test_a_broken_certificate_in_the_cache_folder_is_told_and_not_used(certificate: Certificate) -> None:
    path = stored_path(certificate.model_hash, certificate.prompt_hash)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.warns(CertificateWarning, match="no certificate"), made() as reasoner:
        result = reasoner.reason("Why?", strategy=STRATEGY)
    assert result.verification.exit == "strict"


def test_it_does_not_warn_where_nothing_is_verified(certificate: Certificate) -> None:
    certificate.save(stored_path(certificate.model_hash, certificate.prompt_hash))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with made() as reasoner:
            reasoner.reason("Why?", strategy="direct")
            reasoner.reason("Why?", strategy=SelfConsistency(branches=2))


def test_a_new_certificate_is_taken_up_by_a_running_reasoner(certificate: Certificate) -> None:
    path = stored_path(certificate.model_hash, certificate.prompt_hash)
    certificate.model_copy(update={"confidence": None, "margin": None, "lens": None}).save(path)
    with made() as reasoner:
        before = reasoner.reason("Why?", strategy=STRATEGY)
        certificate.model_copy(update={"confidence": 0.0, "gap": 0.0, "margin": None, "lens": None}).save(path)
        after = reasoner.reason("Why?", strategy=STRATEGY)
    assert (before.verification.skipped, after.verification.skipped) == (0, 3)


def test_a_bad_exit_is_told_when_the_reasoner_is_made() -> None:
    tokenizer = scripted_tokenizer()
    model = tiny_model("Llama", vocab_size=len(tokenizer))
    with pytest.raises(ConfigError, match="exit = 'stricct'"):
        RKSCReasoner.from_model(model, tokenizer, exit="stricct")


@pytest.mark.parametrize("strategy", [BestOfN(), SelfConsistency(), SelfConsistency(vote="verifier", warmup=2)])
def test_calibrate_refuses_what_it_cannot_promise_for(strategy: Any) -> None:
    with scripted_reasoner({"Q": "A"}) as reasoner, pytest.raises(ConfigError, match="calibrate"):
        calibrate(reasoner, ["Q"] * 40, strategy=strategy)


def test_a_branch_without_room_is_not_verified_and_the_others_are() -> None:
    tokenizer = scripted_tokenizer()
    model = tiny_model("Llama", vocab_size=len(tokenizer), max_position_embeddings=160)
    with (
        RKSCReasoner.from_model(model, tokenizer, sampling=Sampling(temperature=1.0, max_tokens=140)) as reasoner,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        results = [reasoner.reason("Why?", strategy=STRATEGY, seed=seed) for seed in range(6)]
    verdicts = [branch.verdict for result in results for branch in result.branches if branch.verdict]
    assert {verdict.score is None for verdict in verdicts} == {True, False}
    assert not any(verdict.skipped for verdict in verdicts)
    assert any("no room left" in str(each.message) for each in said)
    for result in results:
        assert result.verification.verified == sum(b.verdict.score is not None for b in result.branches if b.verdict)
