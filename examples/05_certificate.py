"""Calibrate early exit on questions with known answers, keep the certificate, and reason under it.

    python examples/05_certificate.py --questions my.jsonl --limit 200

A certificate that means something needs some hundred questions. With the few that are the default here it finds no
thresholds that keep the promised risk, says so, and nothing is skipped: that is what it is for.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from rksc_agents import BestOfN, RKSCReasoner, Sampling, calibrate
from rksc_agents.questions import read_questions

QUESTIONS = Path(__file__).parent.parent / "tests" / "data" / "gsm8k_small.jsonl"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--questions", type=Path, default=QUESTIONS)
parser.add_argument("--limit", type=int, default=12)
options = parser.parse_args()
strategy = BestOfN(branches=8, score="verifier")
questions = read_questions(options.questions, limit=options.limit)
with RKSCReasoner.from_pretrained(sampling=Sampling(max_tokens=8), strategy=strategy) as reasoner:
    asked = [question.text for question in questions]
    certificate = calibrate(reasoner, asked, strategy=strategy, save=False).certificate
    path = Path(tempfile.mkdtemp()) / "certificate.json"
    certificate.save(path)
    result = reasoner.reason(asked[0], exit=path, seed=0)
print(f"{certificate.n} decisions, {certificate.errors} of them changed by the thresholds that were chosen")
print(f"saved: {certificate.work_saved:.0%} of the layers; exit: {result.verification.exit}")
