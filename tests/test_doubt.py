"""The decode exit by confidence: which branches end unsure, when, and what that changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import random_tokens, tiny_engine
from tiny_models import tiny_model
from torch import Tensor

from rksc_agents import Answer, BranchEnd, BranchToken, ConfigError, ReasoningResult, RKSCReasoner, SelfConsistency
from rksc_agents.config import EngineConfig, Sampling
from rksc_agents.engine.session import Session
from rksc_agents.model.text import TextCodec
from rksc_agents.reasoning.doubt import doubt_under, quantile
from rksc_agents.testing import ScriptedRunner, scripted_tokenizer
from rksc_agents.verify.confidence import GroupMinimum, MeanTopProbability

# -- the threshold and the look -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([0.0, 10.0], 0.1, 1.0),
        ([5.0, 1.0, 3.0, 2.0, 4.0], 0.1, 1.4),
        ([1.0, 2.0, 3.0], 1.0, 3.0),
        ([7.0], 0.3, 7.0),
    ],
)
def test_the_quantile_lies_between_two_values_in_proportion(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == pytest.approx(expected)
    assert torch.tensor(values).quantile(share).item() == pytest.approx(expected)


class Counting(MeanTopProbability):
    """Notes the lengths at which it was asked."""

    asked: ClassVar[list[int]] = []

    def of_branch(self, token_scores: Sequence[float], logprobs: Sequence[float]) -> float:
        self.asked.append(len(token_scores))
        return super().of_branch(token_scores, logprobs)


def test_a_branch_is_looked_at_from_16_tokens_on_at_every_eighth() -> None:
    measure = Counting()
    measure.asked.clear()
    doubt = doubt_under(measure, 0.5)
    scores = [0.4] * 16 + [0.9] * 24
    told = [doubt(scores[:length], scores[:length]) for length in range(1, 41)]
    assert measure.asked == [16, 24, 32, 40]
    assert [length for length, true in enumerate(told, 1) if true] == [16]


def test_a_branch_as_sure_as_the_threshold_goes_on() -> None:
    scores = [0.1] * 16
    assert not doubt_under(MeanTopProbability(), 0.1)(scores, scores)
    assert doubt_under(MeanTopProbability(), 0.101)(scores, scores)


@given(
    window=st.integers(1, 40),
    scores=st.lists(st.integers(0, 9).map(float), min_size=1, max_size=120),
    threshold=st.integers(0, 18).map(lambda half: half / 2 + 0.25),
)
@example(window=2, scores=[9.0] * 8 + [0.0, 0.0] + [9.0] * 6, threshold=0.25)
@settings(max_examples=200, deadline=None)
def test_the_group_minimum_is_known_from_the_last_windows(window: int, scores: list[float], threshold: float) -> None:
    measure = GroupMinimum(window=window)
    doubt = doubt_under(measure, threshold)
    lengths = range(1, len(scores) + 1)
    first = next((n for n in lengths if doubt(scores[:n], scores[:n])), None)
    limit = threshold - 1e-6 * max(1.0, threshold)
    looks = [n for n in lengths if n >= window and n % 8 == 0]
    assert first == next((n for n in looks if measure.of_branch(scores[:n], []) < limit), None)


# -- the engine -----------------------------------------------------------------------------------

PROMPT = random_tokens(12)


def test_a_doubted_row_ends_unsure_and_the_others_go_on() -> None:
    """What it wrote stays: going on from there gives what it would have written."""
    seen: list[tuple[int, int]] = []

    def doubt(scores: Sequence[float], logprobs: Sequence[float]) -> bool:
        seen.append((len(scores), len(logprobs)))
        return len(scores) == 5 and len(seen) == 9  # the first of the two rows

    async def solve(session: Session) -> Any:
        root = await session.prefill(PROMPT)
        cut, whole = await session.decode(session.fork(root, 2), Sampling(temperature=0, max_tokens=12), doubt=doubt)
        assert cut.cursor is not None
        assert cut.cursor.node.end == len(PROMPT) + 4  # the last token has no KV yet
        (rest,) = await session.decode([cut.cursor], Sampling(temperature=0, max_tokens=7))
        return cut, whole, rest

    with tiny_engine(tiny_model("Llama")) as engine:
        cut, whole, rest = engine.run(solve)
        engine.check_books()
    assert (cut.finish_reason, len(cut.tokens), len(cut.scores)) == ("unsure", 5, 5)
    assert (whole.finish_reason, len(whole.tokens)) == ("length", 12)
    assert cut.tokens + rest.tokens == whole.tokens
    assert seen == [(n, n) for n in range(1, 6) for _ in range(2)] + [(n, n) for n in range(6, 12)]


def test_eos_stop_and_length_come_first() -> None:
    def always(scores: Sequence[float], logprobs: Sequence[float]) -> bool:
        return len(scores) == 3

    def ends(sampling: Sampling, eos: Sequence[int] = ()) -> Any:
        async def solve(session: Session) -> Any:
            return await session.decode([await session.prefill(PROMPT)], sampling, doubt=always)

        with tiny_engine(tiny_model("Llama"), eos=eos) as engine:
            return engine.run(solve)[0]

    drawn = Sampling(temperature=2.0, seed=1)
    first, second, third = ends(drawn).tokens
    assert third not in (first, second)
    assert ends(drawn).finish_reason == "unsure"
    assert ends(drawn, [third]).finish_reason == "eos"
    assert ends(drawn.replace(stop=[str(third)])).finish_reason == "stop"
    assert ends(drawn.replace(max_tokens=3)).finish_reason == "length"
    assert ends(drawn.replace(max_tokens=2)).finish_reason == "length"


# -- the strategy ---------------------------------------------------------------------------------

SURE, SHAKY = "S" + "u" * 30 + "42", 32
MEASURE = GroupMinimum(window=8, top_k=2)


def _letter(text: str) -> str:
    return text[:1]


@pytest.fixture(scope="module")
def reasoner() -> Iterator[RKSCReasoner]:
    """A model that begins with S and is sure of every further letter, or with D (more often) and of none."""
    tokenizer = scripted_tokenizer()
    ids = {mark: tokenizer.get_vocab()[mark] for mark in ("<|assistant|>", "<|end|>", *"SDuab42")}

    def next_logits(tokens: tuple[int, ...]) -> Tensor:
        written = tokens[len(tokens) - tokens[::-1].index(ids["<|assistant|>"]) :]
        logits = torch.full((len(tokenizer),), -1e4)
        if not written:
            logits[ids["S"]], logits[ids["D"]] = math.log(0.4), math.log(0.6)
        elif written[0] == ids["S"]:
            logits[ids[SURE[len(written)]] if len(written) < len(SURE) else ids["<|end|>"]] = 0.0
        elif len(written) < SHAKY:
            logits[ids["a"]] = logits[ids["b"]] = 0.0
        else:
            logits[ids["<|end|>"]] = 0.0
        return logits

    with RKSCReasoner(
        lambda budget: ScriptedRunner(next_logits, len(tokenizer), budget),
        TextCodec(tokenizer),
        name="shaky",
        context=256,
        kv_limit=2**24,
        strategy="direct",
        sampling=Sampling(temperature=1.0),
        engine=EngineConfig(),
    ) as made:
        yield made


def strategy(**settings: Any) -> SelfConsistency:
    return SelfConsistency(**{"branches": 10, "stop": None, "confidence": MEASURE, "extract": _letter, **settings})


def seed_where(reasoner: RKSCReasoner, wanted: Callable[[str], bool]) -> int:
    """A seed whose ten branches begin with letters as `wanted`."""
    for seed in range(400):
        result = reasoner.reason("Q", strategy=strategy(), seed=seed, max_tokens=1)
        if wanted("".join(branch.text for branch in result.branches)):
            return seed
    raise AssertionError("no such seed")


@pytest.fixture(scope="module")
def seed(reasoner: RKSCReasoner) -> int:
    """Two sure branches first, and more shaky ones than sure ones in all."""
    return seed_where(reasoner, lambda letters: letters.startswith("SS") and 6 <= letters.count("D") < 8)


def letters(result: ReasoningResult) -> list[str]:
    return [branch.text[0] for branch in result.branches]


def test_unsure_branches_stop_early_and_do_not_vote(reasoner: RKSCReasoner, seed: int) -> None:
    full = reasoner.reason("Q", strategy=strategy(), seed=seed)
    assert full.answer == "D"
    result = reasoner.reason("Q", strategy=strategy(warmup=2), seed=seed)
    assert letters(result) == letters(full)
    for branch, whole in zip(result.branches, full.branches, strict=True):
        if branch.text[0] == "D":
            assert (branch.finish_reason, branch.answer, len(branch.tokens)) == ("unsure", None, 8)
            assert branch.tokens == whole.tokens[:8]
        else:
            assert branch == whole
    shaky = letters(full).count("D")
    assert full.usage.completion_tokens - result.usage.completion_tokens == shaky * (SHAKY + 1 - 8)
    assert result.answer == "S"
    (vote,) = result.votes
    assert (vote.answer, vote.weight) == ("S", 10 - shaky)


@pytest.mark.parametrize("vote", ["auto", "majority", "confidence", "mbr"])
def test_no_rule_looks_at_unsure_branches(reasoner: RKSCReasoner, seed: int, vote: str) -> None:
    result = reasoner.reason("Q", strategy=strategy(warmup=2, vote=vote), seed=seed)
    heard = {index for vote in result.votes for index in vote.branches}
    assert heard == {i for i, branch in enumerate(result.branches) if branch.finish_reason == "eos"}
    assert result.text == SURE


def test_the_warm_up_runs_to_its_end_whatever_its_confidence(reasoner: RKSCReasoner) -> None:
    shaky = seed_where(reasoner, lambda letters: letters.startswith("DD") and "S" in letters)
    full = reasoner.reason("Q", strategy=strategy(), seed=shaky)
    result = reasoner.reason("Q", strategy=strategy(warmup=2), seed=shaky)
    assert result.branches == full.branches  # no branch is under the threshold that the shaky ones set


def test_the_threshold_is_the_quantile_that_keep_leaves(reasoner: RKSCReasoner) -> None:
    """Of a warm-up of S and D, a large share kept puts the threshold just above D's, a small one just under S's."""
    mixed = seed_where(reasoner, lambda letters: set(letters[:2]) == {"S", "D"} and {"S", "D"} == set(letters[2:]))
    full = reasoner.reason("Q", strategy=strategy(), seed=mixed)
    result = reasoner.reason("Q", strategy=strategy(warmup=2, keep=0.1), seed=mixed)
    reasons = {(branch.text[0], branch.finish_reason) for branch in result.branches[2:]}
    assert reasons == {("S", "eos"), ("D", "unsure")}
    assert result.branches[:2] == full.branches[:2]
    keep_all = reasoner.reason("Q", strategy=strategy(warmup=2, keep=1 - 1e-9), seed=mixed)
    assert keep_all.branches == full.branches


def test_a_vote_that_the_warm_up_decides_starts_no_more(reasoner: RKSCReasoner) -> None:
    agreed = seed_where(reasoner, lambda letters: letters.startswith("DDDDDD"))
    result = reasoner.reason("Q", strategy=strategy(warmup=6, stop="decided"), seed=agreed)
    assert (len(result.branches), result.answer) == (6, "D")


def test_without_the_option_nothing_changes(reasoner: RKSCReasoner, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handed = []
    plain = Session.decoding

    def decoding(self: Session, *args: Any, doubt: Any, **kwargs: Any) -> Any:
        handed.append(doubt)
        return plain(self, *args, doubt=doubt, **kwargs)

    monkeypatch.setattr(Session, "decoding", decoding)
    for settings_ in ({}, {"keep": 0.1}, {"first": 4}):
        result = reasoner.reason("Q", strategy=strategy(**settings_), seed=seed)
        assert {branch.finish_reason for branch in result.branches} == {"eos"}
        assert not any(handed)
    handed.clear()
    reasoner.reason("Q", strategy=strategy(warmup=3), seed=seed)
    assert [doubt is not None for doubt in handed] == [False, True]


def test_the_stream_shows_all_that_an_unsure_branch_wrote(reasoner: RKSCReasoner, seed: int) -> None:
    """What a stop text held back comes with the branch's end."""
    held = ["a" * 6 + "!", "b" * 6 + "!", *(a + b + "!" for a in "ab" for b in "ab")]
    events = list(reasoner.stream("Q", strategy=strategy(warmup=2), seed=seed, stop=held))
    assert isinstance(events[-1], Answer)
    result = events[-1].result
    texts = [""] * 10
    for event in events:
        if isinstance(event, BranchToken):
            texts[event.branch] += event.text
    assert texts == [branch.text for branch in result.branches]
    ends = {event.branch: event.finish_reason for event in events if isinstance(event, BranchEnd)}
    unsure = [i for i, branch in enumerate(result.branches) if branch.finish_reason == "unsure"]
    assert unsure
    assert all(ends[i] == "unsure" and len(texts[i]) == 8 for i in unsure)


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"warmup": 1}, "greater than or equal to 2"),
        ({"warmup": 10}, "branches = 10"),
        ({"warmup": 4, "first": 2}, "one of the two"),
        ({"warmup": 4, "keep": 0.0}, "greater than 0"),
        ({"keep": 1.0}, "less than 1"),
        ({"warm_up": 4}, "warmup"),
    ],
)
def test_bad_settings_say_what_is_allowed(settings_: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        strategy(**settings_)
