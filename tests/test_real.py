"""The default model itself: SmolLM2-135M-Instruct on real questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rksc_agents import EngineConfig, Outcome, Problem, RKSCReasoner, SelfConsistency, SelfVerifier, Strategy
from rksc_agents.engine.session import Session
from rksc_agents.model.loader import LoadedModel, load_model
from rksc_agents.model.text import TextCodec
from rksc_agents.verify.words import verdict_tokens

pytestmark = pytest.mark.real

QUESTIONS = [
    json.loads(line)["question"]
    for line in (Path(__file__).parent / "data" / "gsm8k_small.jsonl").read_text().splitlines()[:20]
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(dtype=torch.float32)


@pytest.fixture(scope="module")
def reasoner() -> Iterator[RKSCReasoner]:
    """With a model of its own: one that serves a reasoner serves nobody else."""
    engine = EngineConfig(kv_budget=2**31)
    with RKSCReasoner.from_pretrained(dtype=torch.float32, engine=engine, strategy="direct") as made:
        yield made


def test_greedy_answers_equal_generate(loaded: LoadedModel) -> None:
    """20 GSM8K prompts, 64 tokens, two branches each, all in one batch."""
    tokenizer, model = loaded.tokenizer, loaded.model
    expected = []
    for question in QUESTIONS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False)
        expected.append(tuple(out[0, ids.shape[1] :].tolist()))
    with RKSCReasoner.from_model(model, tokenizer, engine=EngineConfig(kv_budget=2**31)) as reasoner:
        results = reasoner.batch(
            QUESTIONS, strategy=SelfConsistency(branches=2, stop=None), temperature=0, max_tokens=64
        )
    for result, tokens in zip(results, expected, strict=True):
        assert [branch.tokens for branch in result.branches] == [tokens, tokens]


def test_eight_branches_on_one_prefix(reasoner: RKSCReasoner) -> None:
    """The main job: a question, eight branches on one shared prefix, a vote, an answer."""
    result = reasoner.reason(
        QUESTIONS[0], strategy=SelfConsistency(branches=8, stop=None), max_tokens=64, temperature=0.4
    )
    assert len(result.branches) == 8
    assert len({branch.tokens for branch in result.branches}) > 1
    assert result.answer
    if result.rule == "majority":
        assert sum(vote.weight for vote in result.votes) == sum(b.answer is not None for b in result.branches)
    usage, kv = result.usage, result.kv
    assert usage.prompt_tokens == usage.prompt_tokens_computed + usage.prompt_tokens_reused
    assert kv.tokens_shared == 7 * usage.prompt_tokens
    assert kv.bytes_if_copied - kv.peak_bytes == kv.tokens_shared * 46_080


def test_the_next_turn_computes_its_new_tokens(reasoner: RKSCReasoner) -> None:
    turns = [{"role": "user", "content": "Name three colours."}]
    first = reasoner.reason(turns, max_tokens=20, temperature=0)
    turns += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And three animals?"}]
    second = reasoner.reason(turns, max_tokens=5, temperature=0)
    known = first.usage.prompt_tokens + len(first.branches[0].tokens) - 1
    assert second.usage.prompt_tokens_reused >= known - 1
    assert second.usage.prompt_tokens_computed < 20


def test_packed_and_plain_linears_agree(loaded: LoadedModel) -> None:
    prompt = tuple(range(100, 140))

    async def logits(session: Session) -> torch.Tensor:
        cursor = await session.prefill(prompt)
        assert cursor.logits is not None
        return cursor.logits

    got = []
    for packed in (True, False):
        engine = EngineConfig(kv_budget=2**30, fast_linears=packed)
        with RKSCReasoner.from_model(loaded.model, loaded.tokenizer, engine=engine) as reasoner:
            got.append(reasoner._engine.submit(logits).result())
            names = reasoner._engine.runner.packed  # type: ignore[attr-defined]
            assert bool(names) == packed
    assert (got[0] - got[1]).abs().max() < 1e-3


class Verified(Strategy):
    """Eight branches, verified; keeps what that computed and what it was asked about."""

    name = "verified"
    note: Callable[[object], None]

    async def solve(self, problem: Problem) -> Outcome:
        async with problem.branching(await problem.start(8)) as ended:
            async for _ in ended:
                pass
        runner = problem.session._work.scheduler.runner
        before = runner.tokens_computed
        verdicts = await problem.verify(range(8))
        request = SelfVerifier().request
        for index, verdict in enumerate(verdicts):
            written = problem.cursors[index].tokens
            probe = problem.session.codec.follow_up(problem.question, request, written)
            self.note(((*written, *probe), len(probe), verdict))
        self.note(runner.tokens_computed - before)
        return Outcome(0, None)


def test_verification_computes_its_probe_only_and_equals_a_full_prefill(loaded: LoadedModel) -> None:
    """8 branches of 64 tokens on a prefix of 1,024."""
    tokenizer, model = loaded.tokenizer, loaded.model
    question = "\n\n".join(QUESTIONS)
    ids = tokenizer(question)["input_ids"]
    question = tokenizer.decode(ids[: 1024 - 40])
    seen: list[object] = []
    with RKSCReasoner.from_model(model, tokenizer, engine=EngineConfig(kv_budget=2**31), exit="off") as reasoner:
        result = reasoner.reason(
            question, strategy=Verified(note=seen.append), max_tokens=64, ignore_eos=True, temperature=1.0
        )
    *claims, computed = seen
    assert 1000 < result.usage.prompt_tokens <= 1024
    assert computed == sum(probe + 1 for _, probe, _ in claims)  # and each branch's last token, which had no KV yet
    groups = verdict_tokens(TextCodec(tokenizer))
    for sequence, probe, verdict in claims:
        assert verdict.tokens_computed == probe + 1
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([sequence]), logits_to_keep=1).logits[0, -1]
        yes, no = (logits[list(group)].logsumexp(0) for group in groups)
        assert verdict.score == pytest.approx((yes - no).sigmoid().item(), abs=1e-4)
