"""The front door: strategies, results, events, batches, errors, on a scripted model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tiny_models import tiny_model

import rksc_agents
from rksc_agents import (
    Answer,
    BestOfN,
    BranchEnd,
    BranchToken,
    ConfigError,
    Direct,
    EngineClosedError,
    EngineConfig,
    EngineError,
    KVBudgetError,
    Outcome,
    Problem,
    PromptTooLongError,
    RKSCReasoner,
    Sampling,
    SelfConsistency,
    Strategy,
    VoteChanged,
)
from rksc_agents.testing import ScriptError, scripted_reasoner, scripted_tokenizer

SUMS = "What is 6 x 7?"
SCRIPT = {
    SUMS: {"6 x 7 is 42.": 5, "I think it is 41.": 2, "The answer is 42": 1},
    "Say hello": "Hello there!",
    "Think": "<think>Is it 3? No, 4.</think>The answer is 4.",
    "Long": "x" * 500,
    "And then?": "Then 43.",
}


@pytest.fixture(scope="module")
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted_reasoner(SCRIPT) as made:
        yield made


def test_self_consistency_votes_over_equivalent_answers(reasoner: RKSCReasoner) -> None:
    result = reasoner.reason(SUMS, strategy=SelfConsistency(branches=20, stop=None))
    counts = {"42": 0, "41": 0}
    for branch in result.branches:
        assert branch.answer is not None
        counts[branch.answer] += 1
    assert result.answer == "42"
    assert {vote.answer: vote.weight for vote in result.votes} == {k: float(v) for k, v in counts.items()}
    assert min(counts.values()) > 0
    assert result.branches[result.winner].answer == "42"
    assert result.text == result.branches[result.winner].text
    assert result.strategy == "self-consistency"


def test_stopping_when_decided_changes_no_answer(reasoner: RKSCReasoner) -> None:
    for seed in range(12):
        full = reasoner.reason(SUMS, strategy=SelfConsistency(branches=9, stop=None), seed=seed)
        early = reasoner.reason(SUMS, strategy=SelfConsistency(branches=9), seed=seed)
        waves = reasoner.reason(SUMS, strategy=SelfConsistency(branches=9, first=2), seed=seed)
        assert early.answer == waves.answer == full.answer
        assert waves.usage.completion_tokens <= full.usage.completion_tokens
        for branch, same in zip(early.branches, full.branches, strict=True):
            assert same.tokens[: len(branch.tokens)] == branch.tokens
        for branch, same in zip(waves.branches, full.branches, strict=False):
            assert same.tokens[: len(branch.tokens)] == branch.tokens


def test_waves_stop_before_all_branches_are_drawn(reasoner: RKSCReasoner) -> None:
    result = reasoner.reason("Say hello", strategy=SelfConsistency(branches=9, first=3, extract=str.strip))
    assert len(result.branches) == 6  # five equal votes of nine decide; waves of three
    posterior = SelfConsistency(branches=9, first=2, stop=0.85, extract=str.strip)
    assert len(reasoner.reason("Say hello", strategy=posterior).branches) == 2  # P = 7/8 after two equal votes


def test_confidence_vote_weighs_by_softmax(reasoner: RKSCReasoner) -> None:
    strategy = SelfConsistency(branches=12, vote="confidence", stop=None, vote_temperature=0.5)
    result = reasoner.reason(SUMS, strategy=strategy)
    weights = [torch.tensor(b.confidence / 0.5).exp().item() for b in result.branches]
    expected = {
        answer: sum(w for w, b in zip(weights, result.branches, strict=True) if b.answer == answer)
        for answer in ("42", "41")
    }
    got = {vote.answer: vote.weight for vote in result.votes}
    assert got["42"] / got["41"] == pytest.approx(expected["42"] / expected["41"])
    certain = reasoner.reason(
        SUMS, strategy=SelfConsistency(branches=6, vote="confidence", confidence="self-certainty")
    )
    assert sum(vote.weight for vote in certain.votes) == pytest.approx(1.0)


def test_confidence_is_the_mean_top_probability(reasoner: RKSCReasoner) -> None:
    (branch,) = reasoner.reason(SUMS, strategy="direct", temperature=0).branches
    # "6 x 7 is 42." has weight 5 of 8 at its first letter, then there is no choice.
    assert branch.text == "6 x 7 is 42."
    assert branch.confidence == pytest.approx((5 / 8 + 12) / 13, abs=1e-4)
    assert branch.logprobs[0] == pytest.approx(torch.log(torch.tensor(5 / 8)).item(), abs=1e-4)


def test_no_countable_answer_gives_the_surest_text(reasoner: RKSCReasoner) -> None:
    result = reasoner.reason("Say hello", strategy=SelfConsistency(branches=3))
    assert result.answer == "Hello there!"
    assert result.rule == "mbr"
    assert [branch.answer for branch in result.branches] == [None] * 3
    counted = reasoner.reason("Say hello", strategy=SelfConsistency(branches=3, vote="majority"))
    assert (counted.answer, counted.votes, counted.rule) == ("Hello there!", (), "confidence")


def test_best_of_n_by_function_and_by_confidence(reasoner: RKSCReasoner) -> None:
    threads = set()

    def shortest(branch: rksc_agents.Branch) -> float:
        threads.add(threading.current_thread().name)
        return -len(branch.text)

    result = reasoner.reason(SUMS, strategy=BestOfN(branches=12, score=shortest))
    assert len(result.text) == min(len(branch.text) for branch in result.branches)
    assert "rksc-engine" not in threads
    sure = reasoner.reason(SUMS, strategy=BestOfN(branches=12))
    assert sure.branches[sure.winner].confidence == max(branch.confidence for branch in sure.branches)
    with pytest.raises(ConfigError, match="NaN"):
        reasoner.reason(SUMS, strategy=BestOfN(branches=2, score=lambda _: float("nan")))


def test_a_failing_score_is_the_callers_own_error(reasoner: RKSCReasoner) -> None:
    def broken(branch: rksc_agents.Branch) -> float:
        raise LookupError("my checker")

    with pytest.raises(LookupError, match="my checker"):
        reasoner.reason(SUMS, strategy=BestOfN(branches=2, score=broken))


def test_thinking_is_kept_apart(reasoner: RKSCReasoner) -> None:
    result = reasoner.reason("Think", strategy="direct", temperature=0)
    assert (result.text, result.answer) == ("The answer is 4.", "4")
    assert result.branches[0].thinking == "Is it 3? No, 4."


def test_usage_over_turns(reasoner: RKSCReasoner) -> None:
    reasoner.clear_cache()
    first = reasoner.reason("Say hello", strategy=SelfConsistency(branches=4, stop=None))
    tokens = len("<|user|>") * 0 + 1 + len("Say hello") + 1 + 1
    assert first.usage.prompt_tokens == first.usage.prompt_tokens_computed == tokens
    assert first.usage.completion_tokens == 4 * (len("Hello there!") + 1)
    assert first.usage.completion_tokens_winner == len("Hello there!") + 1
    again = reasoner.reason("Say hello", strategy="direct")
    assert again.usage.prompt_tokens_reused == tokens - 1
    chat = [
        {"role": "user", "content": "Say hello"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    second = reasoner.reason(chat, strategy="direct")
    assert second.usage.prompt_tokens_reused == tokens + len("Hello there!")
    assert second.answer == "43"


def test_same_seed_same_text(reasoner: RKSCReasoner) -> None:
    """Alone, in a batch, after other requests."""
    before = torch.get_rng_state()
    alone = reasoner.reason(SUMS, strategy=SelfConsistency(branches=5, stop=None), seed=11)
    batch = reasoner.batch([SUMS] * 5, strategy=SelfConsistency(branches=5, stop=None), seed=11)
    reasoner.reason("Say hello")
    after = reasoner.reason(SUMS, strategy=SelfConsistency(branches=5, stop=None), seed=11)
    texts = [branch.text for branch in alone.branches]
    assert len(set(texts)) > 1
    for result in [*batch, after]:
        assert [branch.text for branch in result.branches] == texts
    other = reasoner.reason(SUMS, strategy=SelfConsistency(branches=5, stop=None), seed=12)
    assert [branch.text for branch in other.branches] != texts
    assert torch.equal(before, torch.get_rng_state())


def test_per_call_beats_constructor() -> None:
    with scripted_reasoner(SCRIPT, strategy="direct", sampling=Sampling(max_tokens=7)) as reasoner:
        assert reasoner.reason("Long").text == "x" * 7
        result = reasoner.reason("Long", max_tokens=3)
        assert (result.text, result.branches[0].finish_reason) == ("xxx", "length")
        stopped = reasoner.reason("Say hello", stop="lo")
        assert (stopped.text, stopped.branches[0].finish_reason) == ("Hel", "stop")
        assert reasoner.reason("Say hello", stop=["zzz"], max_tokens=20).text == "Hello there!"


def test_stream_tells_the_whole_story(reasoner: RKSCReasoner) -> None:
    events = list(reasoner.stream(SUMS, strategy=SelfConsistency(branches=3, stop=None), seed=4))
    result = events[-1]
    assert isinstance(result, Answer)
    texts = ["", "", ""]
    for event in events:
        if isinstance(event, BranchToken):
            texts[event.branch] += event.text
    assert texts == [branch.text for branch in result.result.branches]
    assert sorted(e.branch for e in events if isinstance(e, BranchEnd)) == [0, 1, 2]
    votes = [e.votes for e in events if isinstance(e, VoteChanged)]
    assert votes[-1] == result.result.votes
    assert result.result == reasoner.reason(SUMS, strategy=SelfConsistency(branches=3, stop=None), seed=4).model_copy(
        update={"timings": result.result.timings, "usage": result.result.usage, "kv": result.result.kv}
    )


def test_closing_a_stream_frees_its_rows(reasoner: RKSCReasoner) -> None:
    idle = _idle(reasoner)
    stream = reasoner.stream("Long", strategy=SelfConsistency(branches=4), max_tokens=400)
    assert isinstance(next(stream), BranchToken)
    stream.close()
    assert _idle(reasoner) <= idle + 8 * 10  # the prompt stays cached


def _idle(reasoner: RKSCReasoner) -> int:
    deadline = time.monotonic() + 30
    while reasoner._engine.inspect(lambda scheduler: scheduler.busy):
        assert time.monotonic() < deadline
    return reasoner.kv_bytes


def test_async_forms(reasoner: RKSCReasoner) -> None:
    async def main() -> None:
        result = await reasoner.areason(SUMS, strategy="direct", temperature=0)
        assert result.answer == "42"
        several = await reasoner.abatch([SUMS, "Say hello"], strategy="direct", temperature=0)
        assert [r.text for r in several] == ["6 x 7 is 42.", "Hello there!"]
        events = [event async for event in reasoner.astream("Say hello", strategy="direct", temperature=0)]
        assert "".join(e.text for e in events if isinstance(e, BranchToken)) == "Hello there!"
        assert isinstance(events[-1], Answer)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reasoner.areason("Long", strategy=SelfConsistency(branches=64), max_tokens=500)
        with pytest.raises(ConfigError):
            await reasoner.areason(SUMS, nonsense=1)

    asyncio.run(main())
    _idle(reasoner)


def test_batch_runs_as_one_batch() -> None:
    """16 questions with 8 branches take about as many passes as the longest row."""
    script = {f"{i} and {i}?": [f"It is {2 * i}.", f"Together they make {2 * i}."] for i in range(16)}
    with scripted_reasoner(script) as reasoner:
        results = reasoner.batch(list(script), strategy=SelfConsistency(branches=8, stop=None))
        assert [result.answer for result in results] == [str(2 * i) for i in range(16)]
        longest = max(len(branch.tokens) for result in results for branch in result.branches)
        assert reasoner._engine.runner.passes < 1.3 * longest


def test_batch_raises_the_first_error_and_cancels_the_rest(reasoner: RKSCReasoner) -> None:
    with pytest.raises(EngineError, match="no answer to 'Unknown'") as caught:
        reasoner.batch(["Unknown", "Long"], max_tokens=500)
    assert isinstance(caught.value.__cause__, ScriptError)
    _idle(reasoner)


class Twice(Strategy):
    """A user's own strategy: ask, then go on from the best branch."""

    name = "twice"

    async def solve(self, problem: Problem) -> Outcome:
        async with problem.branching(await problem.start(3)) as ended:
            async for _ in ended:
                pass
        return Outcome(problem.surest(), "mine")


def test_a_users_own_strategy(reasoner: RKSCReasoner) -> None:
    result = reasoner.reason(SUMS, strategy=Twice())
    assert (result.answer, result.strategy, len(result.branches)) == ("mine", "twice", 3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SelfConsistency(branches=0), "greater than or equal to 1"),
        (lambda: SelfConsistency(branches=8, vote="plurality"), "majority"),
        (lambda: SelfConsistency(stop=1.5), "above 0.5 and below 1"),
        (lambda: SelfConsistency(confidence="gut"), "mean-top-probability"),
        (lambda: Direct(extract="magic"), "boxed"),
        (lambda: BestOfN(branch=3), "branches"),
        (lambda: Sampling(temperature=-1), "greater than or equal to 0"),
        (lambda: Sampling(top_p=0), "greater than 0"),
        (lambda: Sampling(stop=["a", ""]), "empty"),
        (lambda: Sampling(max_tokns=3), "max_tokens"),
        (lambda: EngineConfig(kv_budget=-5), "positive number of bytes"),
        (lambda: EngineConfig(kv_budget=1.5), "between 0 and 1"),
    ],
)
def test_bad_settings_say_what_is_allowed(make: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()  # type: ignore[operator]


def test_bad_calls(reasoner: RKSCReasoner) -> None:
    with pytest.raises(ConfigError, match="best-of-n, direct, self-consistency"):
        reasoner.reason(SUMS, strategy="guess")
    with pytest.raises(ConfigError, match="temprature"):
        reasoner.reason(SUMS, temprature=1)
    with pytest.raises(PromptTooLongError, match="context is 4096") as caught:
        reasoner.reason("x" * 5000)
    assert caught.value.tokens == 5003
    with pytest.raises(ConfigError):
        reasoner.reason("")


def test_budget_errors_name_the_numbers() -> None:
    with scripted_reasoner(SCRIPT, kv_budget=800) as reasoner, pytest.raises(KVBudgetError, match="budget is 800"):
        reasoner.reason("Long", strategy=SelfConsistency(branches=50))


def test_closed(reasoner: RKSCReasoner) -> None:
    made = scripted_reasoner(SCRIPT)
    made.reason("Say hello")
    made.close()
    made.close()
    assert made.kv_bytes == 0
    with pytest.raises(EngineClosedError):
        made.reason("Say hello")


def test_the_models_own_sampling_is_the_default() -> None:
    model = tiny_model("Llama", vocab_size=300)
    tokenizer = scripted_tokenizer()
    engine = EngineConfig(kv_budget=2**24, fast_linears=False)
    with RKSCReasoner.from_model(model, tokenizer, engine=engine) as reasoner:
        assert reasoner.sampling == Sampling()
    model.generation_config.do_sample = True
    model.generation_config.temperature, model.generation_config.top_k = 0.3, 20
    with RKSCReasoner.from_model(model, tokenizer, engine=engine) as reasoner:
        assert (reasoner.sampling.temperature, reasoner.sampling.top_k) == (0.3, 20)
    with RKSCReasoner.from_model(model, tokenizer, engine=engine, sampling=Sampling(top_p=0.5)) as reasoner:
        assert reasoner.sampling == Sampling(top_p=0.5)


def test_result_is_json(reasoner: RKSCReasoner) -> None:
    result = reasoner.reason(SUMS, strategy=SelfConsistency(branches=3))
    again = rksc_agents.ReasoningResult.model_validate_json(result.model_dump_json())
    assert again == result


def test_scripted_tokenizer_round_trip() -> None:
    tokenizer = scripted_tokenizer()
    text = "Grüße, 世界 🎉"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_exported_names_are_sorted_and_there() -> None:
    assert rksc_agents.__all__ == sorted(rksc_agents.__all__)
    for name in rksc_agents.__all__:
        assert getattr(rksc_agents, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rksc_agents.nothing  # noqa: B018
