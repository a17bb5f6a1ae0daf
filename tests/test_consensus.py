"""Votes for free text: similarity, the closest text, and which rule decided."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rksc_agents import (
    Answer,
    ConfigError,
    ExitConfig,
    Problem,
    ReasoningResult,
    RKSCReasoner,
    SelfConsistency,
    VoteChanged,
)
from rksc_agents.reasoning.consensus import closest, similarity
from rksc_agents.reasoning.voting import softmax_weights
from rksc_agents.testing import scripted_reasoner
from rksc_agents.types import Verdict

TEXTS = st.text(st.sampled_from(["a", "B", "c", " ", "\n", ".", "é", "好", "ß"]), max_size=12)


# -- similarity -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("the cat sat", "the cat ran", (2 / 3 + 1 / 2 + 0) / 3),  # no text has four words
        ("a b c d", "a b c d e", (8 / 9 + 6 / 7 + 4 / 5 + 2 / 3) / 4),
        ("a a b", "a b b", (2 / 3 + 1 / 2 + 0) / 3),  # a twice and a once: one in common
        ("yes", "no", 0.0),
        ("yes", "yes sir", (2 / 3 + 0) / 2),  # one text is long enough for pairs
        ("x - 1", "x + 1", (2 / 3 + 0 + 0) / 3),
        ("今天好", "今天坏", (2 / 3 + 1 / 2 + 0) / 3),
        ("", "word", 0.0),
        ("", "  ", 1.0),
    ],
)
def test_similarity_is_the_mean_f1_over_n_grams(a: str, b: str, expected: float) -> None:
    assert similarity(a, b) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Straße  frei\n", "STRASSE frei"),
        ("一 二", "一二"),
        ("caf\u00e9", "cafe\u0301"),
        ("हिन्दी में", " हिन्दी\tमें"),
    ],
)
def test_case_white_space_and_composition_do_not_count(a: str, b: str) -> None:
    assert similarity(a, b) == 1.0


def test_a_word_with_combining_signs_is_one_word() -> None:
    assert similarity("हिन्दी", "हिन्द") == 0.0


@given(a=TEXTS, b=TEXTS)
@settings(max_examples=200, deadline=None)
def test_similarity_is_symmetric_and_between_0_and_1(a: str, b: str) -> None:
    value = similarity(a, b)
    assert value == similarity(b, a)
    assert 0.0 <= value <= 1.0
    assert similarity(a, a.upper()) == similarity(a, f" {a}\n") == 1.0


# -- the closest ----------------------------------------------------------------------------------


def test_the_text_closest_to_the_others_wins() -> None:
    texts = ["bananas are blue", "the sky is blue", "the sky is blue today", "the sky is grey"]
    winner, utilities = closest(texts, [1.0] * 4)
    assert winner == 1
    expected = [math.fsum(similarity(a, b) for b in texts if b != a) / 3 for a in texts]
    assert list(utilities) == pytest.approx(expected)


def test_weights_say_whose_likeness_counts() -> None:
    texts = ["red one here", "red one there", "green two here", "green two there"]
    assert closest(texts, [1, 1, 9, 9])[0] == 2
    winner, utilities = closest(["a b", "a c", "d c"], [0.2, 0.3, 0.5])
    half = similarity("a b", "a c")
    assert utilities == pytest.approx((half * 0.3 / 0.8, (half * 0.2 + half * 0.5) / 0.7, half * 0.3 / 0.5))
    assert winner == 1


def test_of_equals_the_earliest_wins_whatever_the_weights() -> None:
    assert closest(["a b", "c d", "a b"], [1.0, 1.0, 1.0])[0] == 0
    for weight in (0.1, 0.3, 0.7, 1e-300, 0.0):
        winner, utilities = closest(["a b c", "a b d"], [weight, 1.0 - weight])
        assert winner == 0
        assert utilities[0] == utilities[1] > 0
    for weight in range(1, 60):  # rounding must not tell apart what is equally alike
        winner, utilities = closest(["a b c", "a d e", "a f g", "a h i"], [0.1, weight / 7, 0.3, weight / 11])
        assert (winner, len(set(utilities))) == (0, 1)


def test_empty_texts_never_win_against_others() -> None:
    assert closest(["", " ", "", "word"], [1.0] * 4) == (3, (0.0,) * 4)
    assert closest(["\n", ""], [1.0, 1.0]) == (0, (0.0, 0.0))


def test_a_text_alone_wins() -> None:
    assert closest(["only"], [0.0]) == (0, (1.0,))
    assert closest([""], [1.0]) == (0, (0.0,))


@given(texts=st.lists(TEXTS, min_size=1, max_size=6), data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_winner_has_the_largest_utility(texts: list[str], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0, 10), min_size=len(texts), max_size=len(texts)))
    winner, utilities = closest(texts, weights)
    assert all(0.0 <= utility <= 1.0 for utility in utilities)
    assert utilities[winner] == max(utilities)
    assert texts[winner].strip() or not any(text.strip() for text in texts)
    assert closest(texts, [weight / 7 for weight in weights])[0] == winner


@pytest.mark.parametrize(
    ("texts", "weights"), [([], []), (["a"], []), (["a"], [-1.0]), (["a", "b"], [1.0, math.nan]), (["a"], [math.inf])]
)
def test_weights_are_one_for_each_text_and_not_negative(texts: list[str], weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="weight"):
        closest(texts, weights)


# -- which rule decided ---------------------------------------------------------------------------

SCRIPT = {
    "Sum": {"It is 42.": 5, "It is 41.": 2},
    "Each": [f"It is {n}." for n in range(1, 400)],
    "Poem": {
        "The sea is calm and blue tonight.": 3,
        "The sea is calm and grey tonight.": 3,
        "Cats.": 8,
        "Waves roll on the shore, and on.": 1,
    },
    "Void": "",
    "Hardly": {"": 4, "a": 1, "b": 1, "c": 1, "d": 1},
    "Flood": {"a": 3, "It is 42." + " And so on." * 12: 1},
}


@pytest.fixture(scope="module")
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted_reasoner(SCRIPT) as made:
        yield made


def test_auto_takes_the_majority_where_two_branches_agree(reasoner: RKSCReasoner) -> None:
    auto = reasoner.reason("Sum", strategy=SelfConsistency(branches=6), seed=1)
    assert SelfConsistency().vote == "auto"
    assert (auto.rule, auto.answer) == ("majority", "42")
    plain = reasoner.reason("Sum", strategy=SelfConsistency(branches=6, vote="majority"), seed=1)
    assert (plain.rule, plain.votes, plain.winner) == ("majority", auto.votes, auto.winner)


def test_auto_goes_by_closeness_where_no_two_answers_agree(reasoner: RKSCReasoner) -> None:
    result = reasoner.reason("Each", strategy=SelfConsistency(branches=4), seed=3)
    answers = [branch.answer for branch in result.branches]
    assert len(set(answers)) == 4
    assert result.rule == "mbr"
    assert result.answer == answers[result.winner]
    assert all(branch.finish_reason == "eos" for branch in result.branches)


@pytest.mark.parametrize("vote", ["auto", "mbr"])
def test_free_texts_are_compared_and_the_utilities_shown(reasoner: RKSCReasoner, vote: str) -> None:
    weighted_differs = False
    for seed in range(6):
        result = reasoner.reason("Poem", strategy=SelfConsistency(branches=8, vote=vote), seed=seed)
        assert result.rule == "mbr"
        texts = [branch.text for branch in result.branches]
        assert all(branch.answer is None for branch in result.branches)
        weights: Sequence[float] = [1.0] * 8
        if vote == "auto":
            weights = softmax_weights([branch.confidence for branch in result.branches], 0.1)
            weighted_differs |= closest(texts, weights)[1] != closest(texts, [1.0] * 8)[1]
        utilities = dict(enumerate(closest(texts, weights)[1]))
        assert {vote.branches[0]: vote.weight for vote in result.votes} == pytest.approx(utilities)
        assert [vote.weight for vote in result.votes] == sorted((v.weight for v in result.votes), reverse=True)
        best = [i for i, utility in utilities.items() if utility == pytest.approx(max(utilities.values()))]
        surest = max(best, key=lambda i: (result.branches[i].confidence, -i))
        assert (result.winner, result.votes[0].branches) == (surest, (surest,))
        assert result.answer == result.text == texts[surest] == result.votes[0].answer
    assert weighted_differs == (vote == "auto")


def test_of_two_texts_the_surer_wins(reasoner: RKSCReasoner) -> None:
    for seed in range(8):
        result = reasoner.reason("Poem", strategy=SelfConsistency(branches=2), seed=seed)
        surest = max((0, 1), key=lambda i: (result.branches[i].confidence, -i))
        assert (result.rule, result.winner) == ("mbr", surest)


def test_texts_that_are_empty_leave_no_answer(reasoner: RKSCReasoner) -> None:
    result = reasoner.reason("Void", strategy=SelfConsistency(branches=3))
    assert (result.rule, result.winner, result.answer, result.text) == ("mbr", 0, None, "")


def test_a_text_wins_against_surer_silence(reasoner: RKSCReasoner) -> None:
    strategy = SelfConsistency(branches=2, confidence="mean-log-probability")
    seen = 0
    for seed in range(12):
        result = reasoner.reason("Hardly", strategy=strategy, seed=seed)
        texts = [branch.text for branch in result.branches]
        if texts.count("") == 1:
            seen += 1
            silent = result.branches[texts.index("")]
            assert silent.confidence > result.branches[result.winner].confidence
            assert result.text == result.votes[0].answer == max(texts)
            assert [vote.weight for vote in result.votes] == [0.0, 0.0]
    assert seen


@pytest.mark.parametrize("question", ["Sum", "Poem"])
def test_one_branch_is_compared_with_nothing(
    reasoner: RKSCReasoner, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("rksc_agents.reasoning.rules.closest", never)
    result = reasoner.reason(question, strategy=SelfConsistency(branches=1), seed=1)
    assert (result.rule, result.winner) == (None, 0)
    assert result.answer in ("42", "41", result.text)


def test_without_answers_a_count_falls_to_the_surest(reasoner: RKSCReasoner) -> None:
    for vote in ("majority", "confidence"):
        result = reasoner.reason("Poem", strategy=SelfConsistency(branches=6, vote=vote), seed=2)
        assert (result.rule, result.votes) == ("confidence", ())
        assert result.branches[result.winner].confidence == max(branch.confidence for branch in result.branches)


def test_a_confidence_vote_says_so(reasoner: RKSCReasoner) -> None:
    for measure in ("mean-top-probability", "self-certainty"):
        strategy = SelfConsistency(branches=6, vote="confidence", confidence=measure)
        result = reasoner.reason("Sum", strategy=strategy, seed=2)
        assert (result.rule, result.answer) == ("confidence", "42")


def test_strategies_that_do_not_vote_name_no_rule(reasoner: RKSCReasoner) -> None:
    assert reasoner.reason("Sum", strategy="direct").rule is None
    assert reasoner.reason("Sum", strategy="best-of-n").rule == "confidence"


def test_auto_stops_early_for_an_answer_that_two_gave(reasoner: RKSCReasoner) -> None:
    flood = SelfConsistency(branches=8, extract=lambda text: "1" if text == "a" else None)
    early = reasoner.reason("Flood", strategy=flood, seed=5)
    assert "cancelled" in [branch.finish_reason for branch in early.branches]
    assert (early.rule, early.answer) == ("majority", "1")
    one_by_one = SelfConsistency(branches=5, first=1, stop=0.7)  # one vote alone has a posterior of 3/4
    for seed in range(6):
        result = reasoner.reason("Sum", strategy=one_by_one, seed=seed)
        assert len(result.votes[0].branches) >= 2
        assert len(reasoner.reason("Sum", strategy=one_by_one.replace(vote="majority"), seed=seed).branches) == 1


@pytest.mark.parametrize("stop", ["decided", 0.6])
def test_rules_over_texts_wait_for_all(reasoner: RKSCReasoner, stop: float | str) -> None:
    strategy = SelfConsistency(branches=8, vote="mbr", stop=stop, extract=lambda _: "same")
    result = reasoner.reason("Flood", strategy=strategy, seed=5)
    assert {branch.finish_reason for branch in result.branches} == {"eos"}
    assert len({len(branch.text) for branch in result.branches}) == 2
    waves = reasoner.reason("Flood", strategy=strategy.replace(first=3), seed=5)
    assert [branch.text for branch in waves.branches] == [branch.text for branch in result.branches]


def test_branches_that_were_cut_short_are_no_candidates(reasoner: RKSCReasoner) -> None:
    """A vote weighed at the end, over what ended before the posterior was reached."""
    strategy = SelfConsistency(
        branches=8, vote="confidence", confidence="self-certainty", stop=0.7, extract=lambda text: text[0]
    )
    result = reasoner.reason("Flood", strategy=strategy, seed=5)
    cut = {i for i, branch in enumerate(result.branches) if branch.finish_reason == "cancelled"}
    assert cut
    assert not cut & {i for vote in result.votes for i in vote.branches}
    assert math.fsum(vote.weight for vote in result.votes) == pytest.approx(1.0)


@pytest.mark.parametrize("vote", ["auto", "mbr"])
def test_whoever_watches_sees_the_final_vote(reasoner: RKSCReasoner, vote: str) -> None:
    for question in ("Sum", "Poem"):
        events = list(reasoner.stream(question, strategy=SelfConsistency(branches=4, vote=vote), seed=2))
        assert isinstance(events[-1], Answer)
        changes = [event.votes for event in events if isinstance(event, VoteChanged)]
        assert changes[-1] == events[-1].result.votes
        if vote == "mbr":
            assert len(changes) == 1


def test_the_rule_is_in_the_json(reasoner: RKSCReasoner) -> None:
    result = reasoner.reason("Poem", strategy=SelfConsistency(branches=3))
    assert '"rule":"mbr"' in result.model_dump_json()
    assert ReasoningResult.model_validate_json(result.model_dump_json()) == result


# -- verdicts and names ---------------------------------------------------------------------------


def verdicts(monkeypatch: pytest.MonkeyPatch, score: dict[str, float | None]) -> list[list[int]]:
    """Let verification give each text its score; returns what was asked for."""
    asked = []

    async def verify(self: Problem, indices: Sequence[int]) -> list[Verdict]:
        asked.append(list(indices))
        await asyncio.sleep(0)
        scores = [score[self.branches[i].text] for i in indices]
        return [Verdict(score=value) for value in scores]

    monkeypatch.setattr(Problem, "verify", verify, raising=False)
    return asked


def test_verdicts_weigh_the_answers(reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = verdicts(monkeypatch, {"It is 42.": 0.1, "It is 41.": 0.9})
    result = reasoner.reason("Sum", strategy=SelfConsistency(branches=8, vote="verifier"), seed=1)
    texts = [branch.text for branch in result.branches]
    assert asked == [list(range(8))]
    assert 1 <= texts.count("It is 41.") < texts.count("It is 42.")
    assert (result.rule, result.answer) == ("verifier", "41")
    expected = {"41": 0.9 * texts.count("It is 41."), "42": 0.1 * texts.count("It is 42.")}
    assert {vote.answer: vote.weight for vote in result.votes} == pytest.approx(expected)


def test_verdicts_decide_between_texts_too(reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = dict.fromkeys(SCRIPT["Poem"], 0.1) | {"Cats.": 0.0, "The sea is calm and grey tonight.": 0.9}
    verdicts(monkeypatch, scores)
    result = reasoner.reason("Poem", strategy=SelfConsistency(branches=8, vote="verifier"), seed=1)
    assert (result.rule, result.answer) == ("verifier", "The sea is calm and grey tonight.")
    assert result.votes[0].weight == pytest.approx(0.9 * len(result.votes[0].branches))


def test_unverified_branches_leave_the_vote_to_confidence(
    reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts(monkeypatch, {"It is 42.": None, "It is 41.": None})
    result = reasoner.reason("Sum", strategy=SelfConsistency(branches=8, vote="verifier"), seed=1)
    plain = reasoner.reason("Sum", strategy=SelfConsistency(branches=8, vote="confidence", stop=None), seed=1)
    assert (result.rule, result.winner, result.answer) == ("confidence", plain.winner, plain.answer)
    assert math.fsum(vote.weight for vote in result.votes) == pytest.approx(1.0)


def test_where_verification_is_skipped_the_decisive_branch_wins_whatever_the_others_say(
    reasoner: RKSCReasoner,
) -> None:
    """It is the decision that a certificate is about."""
    spared = SelfConsistency(branches=8, vote="verifier")
    result = reasoner.reason("Sum", strategy=spared, exit=ExitConfig(confidence=0.0), seed=1)
    confidences = [branch.confidence for branch in result.branches]
    assert result.verification.skipped == 8
    assert result.winner == confidences.index(max(confidences))
    assert (result.rule, result.votes) == ("confidence", ())
    assert result.answer == result.branches[result.winner].answer


def names(monkeypatch: pytest.MonkeyPatch, index: int | None) -> list[list[str]]:
    """Let the model name the text with that index; returns what it was asked about."""
    asked = []

    async def name_best(self: Problem, texts: list[str]) -> int | None:
        asked.append(list(texts))
        await asyncio.sleep(0)
        return index

    monkeypatch.setattr(Problem, "name_best", name_best, raising=False)
    return asked


def test_the_model_names_the_winner(reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = names(monkeypatch, 2)
    result = reasoner.reason("Poem", strategy=SelfConsistency(branches=5, vote="universal"), seed=1)
    assert asked == [[branch.text for branch in result.branches]]
    assert (result.rule, result.winner, result.answer) == ("universal", 2, asked[0][2])
    assert [vote.branches for vote in result.votes] == [(2,)]


def test_what_does_not_fit_is_compared_instead_and_a_warning_says_so(
    reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch
) -> None:
    names(monkeypatch, None)
    with pytest.warns(UserWarning, match="the 5 candidates do not fit") as caught:
        result = reasoner.reason("Poem", strategy=SelfConsistency(branches=5, vote="universal"), seed=1)
    plain = reasoner.reason("Poem", strategy=SelfConsistency(branches=5, vote="mbr"), seed=1)
    assert len(caught) == 1
    assert (result.rule, result.winner, result.votes) == ("mbr", plain.winner, plain.votes)


def test_nothing_is_asked_about_one_text(reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = names(monkeypatch, 0)
    assert reasoner.reason("Poem", strategy=SelfConsistency(branches=1, vote="universal")).rule == "mbr"
    assert asked == []
