"""The draw of tokens: distributions against transformers, the draw against the distribution, rows apart."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rksc_agents.config import Sampling
from rksc_agents.errors import ConfigError, EngineError
from rksc_agents.model import filters
from rksc_agents.model.sampling import RowState, Sampler, TokenHistory


def random_logits(rows: int, size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def row(seed: int = 0, branch: int = 0, history: TokenHistory | None = None, **fields: object) -> RowState:
    return RowState(Sampling(**fields), Sampler.generator(seed, branch), history or TokenHistory())


def reference(logits: Tensor, sampling: Sampling, history: Tensor) -> Tensor:
    """The distribution that transformers would draw from."""
    chain = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain(history, logits.clone()).softmax(-1)


def dense(found: filters.Candidates, size: int) -> Tensor:
    weights = found.weights
    if found.ids is not None:
        weights = torch.zeros(len(weights), size).scatter(-1, found.ids, weights)
    return weights / weights.sum(-1, keepdim=True)


SETTINGS = [
    {"temperature": t, "top_k": k, "top_p": p, "min_p": m, "repetition_penalty": r}
    for t, k, p, m, r in itertools.product((0.3, 1.0, 2.5), (0, 1, 40), (1.0, 0.9, 0.3), (0.0, 0.1), (1.0, 1.3))
]


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
@pytest.mark.parametrize("size", [60, 3000])
def test_the_distribution_is_that_of_transformers(fields: dict[str, float], size: int) -> None:
    sampling = Sampling(**fields)
    logits = random_logits(4, size, seed=size)
    history = torch.randint(size, (4, 12), generator=torch.Generator().manual_seed(1))
    expected = reference(logits, sampling, history)

    if sampling.repetition_penalty != 1.0:
        logits = filters.penalized(logits, sampling.repetition_penalty, [h.unique() for h in history])
    found = dense(filters.whole(logits, sampling), size)
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, atol=1e-6, rtol=0)

    short, settled = filters.shortlist(logits, sampling)
    if short is not None:
        assert torch.equal((dense(short, size) > 0)[settled], (expected > 0)[settled])
        assert torch.allclose(dense(short, size)[settled], expected[settled], atol=1e-6, rtol=0)


def test_top_p_uses_the_shortlist_for_peaked_rows_and_the_whole_vocabulary_for_flat_ones() -> None:
    logits = torch.cat([random_logits(1, 4000, scale=5.0), random_logits(1, 4000, scale=0.1)])
    short, settled = filters.shortlist(logits, Sampling(top_p=0.9, temperature=1.0))
    assert short is not None
    assert settled.tolist() == [True, False]
    # a flat distribution over 4,000 tokens needs thousands of them, far beyond the shortlist
    uniform = torch.full((2,), 1.0 - 1e-9, dtype=torch.float64)
    expected = reference(logits, Sampling(top_p=0.9, temperature=1.0), torch.zeros(2, 1, dtype=torch.int64))
    last = [row.nonzero().max().item() for row in expected]
    assert filters.draw(logits, Sampling(top_p=0.9, temperature=1.0), uniform).tolist() == last


def test_ties_at_the_top_k_boundary_are_all_kept_as_in_transformers() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    sampling = Sampling(top_k=2, temperature=1.0)
    uniform = torch.linspace(0, 0.999, 200, dtype=torch.float64)
    drawn = set(filters.draw(logits.expand(200, -1), sampling, uniform).tolist())
    assert drawn == {0, 1, 2, 3}
    expected = reference(logits, sampling, torch.zeros(1, 1, dtype=torch.int64))
    assert torch.allclose(dense(filters.whole(logits, sampling), 5), expected, atol=1e-6)


@pytest.mark.parametrize("size", [5, 513, 1000, 1024])
def test_the_draw_is_the_inverse_of_the_cumulative_distribution(size: int) -> None:
    logits = random_logits(1, size, seed=size, scale=1.0)
    ends = logits.double().softmax(-1).cumsum(-1)[0]
    middles = (ends + torch.cat([torch.zeros(1, dtype=torch.float64), ends[:-1]])) / 2
    drawn = filters.draw(logits.expand(size, -1), Sampling(temperature=1.0), middles)
    assert drawn.tolist() == list(range(size))


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8}], ids=str
)
def test_draws_follow_the_distribution(fields: dict[str, float]) -> None:
    draws = 4000
    logits = random_logits(1, 8, seed=3, scale=1.0)
    state = row(seed=11, temperature=0.9, **fields)
    counts = torch.zeros(8)
    sampler = Sampler()
    for _ in range(draws // 100):
        for token in sampler.sample(logits.expand(100, -1), [state] * 100).tokens:
            counts[token] += 1
    expected = reference(logits, state.sampling, torch.zeros(1, 1, dtype=torch.int64))[0] * draws
    alive = expected > 0
    assert counts[~alive].sum() == 0
    chi_square = ((counts - expected)[alive] ** 2 / expected[alive]).sum().item()
    assert chi_square < 24.3  # 0.1 % point at seven degrees of freedom, the most there are here


def test_a_zero_weight_token_is_never_drawn_at_the_edges() -> None:
    logits = torch.full((1, 1500), -torch.inf)
    logits[0, 700] = 1.0
    for edge in (0.0, 0.5, 1.0 - 2**-53):
        assert filters.draw(logits, Sampling(), torch.tensor([edge], dtype=torch.float64)).item() == 700


def mixed_rows(vocabulary: int) -> list[RowState]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 20},
        {"top_p": 0.8, "temperature": 1.5},
        {"min_p": 0.05},
        {"repetition_penalty": 1.3},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1},
    ]
    return [
        row(seed=5, branch=b, history=TokenHistory(range(b, vocabulary, 97)), **kinds[b % len(kinds)])
        for b in range(28)
    ]


def test_a_rows_result_does_not_depend_on_the_other_rows() -> None:
    size, steps, sampler = 5000, 4, Sampler()
    logits = [random_logits(28, size, seed=step) for step in range(steps)]
    together, apart = mixed_rows(size), mixed_rows(size)
    for step in range(steps):
        drawn = sampler.sample(logits[step], together)
        alone = [sampler.sample(logits[step][i : i + 1], [state]) for i, state in enumerate(apart)]
        assert drawn.tokens == [one.tokens[0] for one in alone]
        assert drawn.logprobs == [one.logprobs[0] for one in alone]


@given(order=st.permutations(range(28)))
@settings(max_examples=20, deadline=None)
def test_the_order_of_rows_changes_nothing(order: list[int]) -> None:
    logits = random_logits(28, 700)
    straight = Sampler().sample(logits, mixed_rows(700))
    states = mixed_rows(700)
    shuffled = Sampler().sample(logits[torch.tensor(order)], [states[i] for i in order])
    assert shuffled.tokens == [straight.tokens[i] for i in order]
    assert shuffled.logprobs == [straight.logprobs[i] for i in order]


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = random_logits(28, 900)
    drawn = Sampler().sample(logits, mixed_rows(900))
    expected = logits.double().log_softmax(-1)[torch.arange(28), torch.tensor(drawn.tokens)]
    assert torch.allclose(torch.tensor(drawn.logprobs, dtype=torch.float64), expected, atol=1e-5)


def test_greedy_takes_the_first_of_equal_maxima_and_moves_no_generator() -> None:
    state = row(temperature=0.0)
    before = state.generator.get_state()
    assert Sampler().sample(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), [state]).tokens == [1]
    assert torch.equal(state.generator.get_state(), before)


def test_greedy_obeys_the_repetition_penalty_and_remembers_what_it_drew() -> None:
    state = row(temperature=0.0, repetition_penalty=1.5)
    logits = torch.tensor([[2.0, 1.9, -1.0]])
    assert [Sampler().sample(logits, [state]).tokens[0] for _ in range(3)] == [0, 1, 0]
    assert 0 in state.history
    assert len(state.history) == 2


def test_the_history_stays_empty_without_a_penalty() -> None:
    state = row(temperature=0.5)
    Sampler().sample(random_logits(1, 9), [state])
    assert len(state.history) == 0


def test_negative_logits_are_multiplied_and_ids_beyond_the_head_ignored() -> None:
    logits = torch.tensor([[-1.0, 1.0, 0.5]])
    penalized = filters.penalized(logits, 2.0, [torch.tensor([0, 1, 7])])
    assert penalized.tolist() == [[-2.0, 0.5, 0.5]]
    assert logits.tolist() == [[-1.0, 1.0, 0.5]]


def test_a_fork_of_a_history_goes_its_own_way() -> None:
    first = TokenHistory([4, 4, 2])
    second = first.fork()
    second.add(9)
    assert (first.ids().tolist(), second.ids().tolist()) == ([4, 2], [4, 2, 9])


def test_one_number_of_the_generator_per_token() -> None:
    state, other = row(seed=3), Sampler.generator(3, 0)
    Sampler().sample(random_logits(1, 50), [state])
    torch.rand(1, generator=other, dtype=torch.float64)
    assert torch.equal(state.generator.get_state(), other.get_state())


def test_generators_of_neighbouring_seeds_and_branches_differ() -> None:
    pairs = [(seed, branch) for seed in range(40) for branch in range(40)]
    first = {torch.rand(2, generator=Sampler.generator(*pair), dtype=torch.float64).sum().item() for pair in pairs}
    assert len(first) == len(pairs)
    assert Sampler.generator(1, 12).initial_seed() != Sampler.generator(11, 2).initial_seed()
    assert Sampler.generator(2**63 - 1, 7).initial_seed() == Sampler.generator(2**63 - 1, 7).initial_seed()


def test_the_generator_of_a_pair_never_changes() -> None:
    assert Sampler.generator(0, 0).initial_seed() == 5857645148978988075
    assert torch.rand(1, generator=Sampler.generator(0, 0), dtype=torch.float64).item() == 0.5572840515640747


def test_the_global_generator_stays_untouched() -> None:
    before = torch.random.get_rng_state()
    Sampler().sample(random_logits(28, 800), mixed_rows(800))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_logits_stay_untouched() -> None:
    logits = random_logits(28, 800)
    copy = logits.clone()
    Sampler().sample(logits, mixed_rows(800))
    assert torch.equal(logits, copy)


@pytest.mark.parametrize("temperature", [1e-45, 1e-8, 100.0])
def test_extreme_temperatures_stay_defined(temperature: float) -> None:
    drawn = Sampler().sample(torch.tensor([[1e4, -1e4, 9e3]]), [row(temperature=temperature)])
    assert drawn.tokens == [0]  # e**-10 at the highest


def test_half_precision_is_computed_in_fp32() -> None:
    logits = random_logits(1, 300).bfloat16()
    drawn = Sampler().sample(logits, [row(temperature=0.0)])
    assert drawn.logprobs[0] == pytest.approx(logits.float().log_softmax(-1).max().item(), abs=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_raise_and_name_the_row(bad: float) -> None:
    logits = random_logits(3, 10)
    logits[1, 4] = bad
    states = [row(branch=b) for b in range(3)]
    before = [state.generator.get_state() for state in states]
    with pytest.raises(EngineError, match="row 1"):
        Sampler().sample(logits, states)
    assert all(torch.equal(state.generator.get_state(), old) for state, old in zip(states, before, strict=True))


def test_a_row_of_nothing_but_minus_infinity_raises() -> None:
    with pytest.raises(EngineError, match="-inf"):
        Sampler().sample(torch.full((1, 4), -torch.inf), [row()])


def test_logits_and_rows_must_agree() -> None:
    with pytest.raises(ConfigError, match="2 rows"):
        Sampler().sample(random_logits(3, 10), [row(), row()])
    assert Sampler().sample(torch.empty(0, 10), []).tokens == []
