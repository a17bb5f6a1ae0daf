"""ASKS through the front door: what branches with prompts of their own share, what it costs, and what it says of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from tiny_models import tiny_model
from transformers import PreTrainedModel

from rksc_agents import (
    BestOfN,
    ConfigError,
    Direct,
    EngineConfig,
    Outcome,
    Problem,
    ReasoningResult,
    RKSCReasoner,
    Sampling,
    SelfConsistency,
    Strategy,
    UnsupportedModelError,
)
from rksc_agents.config import Sharing
from rksc_agents.engine.asks import AUDITED, roots, sigma, similarity
from rksc_agents.engine.session import Session
from rksc_agents.model.text import TextCodec
from rksc_agents.reasoning.hints import hinted
from rksc_agents.testing import scripted_reasoner, scripted_tokenizer
from rksc_agents.types import Branch, SharingRecord
from rksc_agents.verify.callable_verifier import CallableVerifier
from rksc_agents.verify.words import verdict_tokens

TOKENIZER = scripted_tokenizer()
CODEC = TextCodec(TOKENIZER)
ASKED = "If a train needs 3 hours to the town of Linden, when is it there?"
LIKE = "Tell me: if a train needs 3 hours to the town of Linden, when is it there?"
OTHER = "How late is it when the train of 9 has reached Linden?"
PROMPTS = tuple(CODEC.encode(text) for text in (ASKED, LIKE, OTHER))
ALL = SelfConsistency(branches=3, stop=None, vote="majority")
DEEP = 8


def model_of(name: str = "Llama", layers: int = DEEP) -> PreTrainedModel:
    return tiny_model(name, vocab_size=len(TOKENIZER), num_hidden_layers=layers)


@contextmanager
def asking(model: PreTrainedModel) -> Iterator[RKSCReasoner]:
    engine = EngineConfig(kv_budget=2**26, fast_linears=False)
    sampling = Sampling(temperature=0, max_tokens=6, ignore_eos=True)
    with RKSCReasoner.from_model(model, TOKENIZER, engine=engine, sampling=sampling, exit="off") as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> PreTrainedModel:
    """A twin of the reasoner's model, to be called as it is."""
    return model_of()


@pytest.fixture(scope="module")
def shared() -> Iterator[RKSCReasoner]:
    with asking(model_of()) as made:
        yield made


@pytest.fixture
def reasoner(shared: RKSCReasoner) -> RKSCReasoner:
    shared.clear_cache()
    return shared


def within(reasoner: RKSCReasoner, solve: Callable[[Session], Coroutine[Any, Any, Any]]) -> Any:
    return reasoner._engine.submit(solve).result(timeout=60)


def computed(reasoner: RKSCReasoner) -> int:
    return int(reasoner._engine.inspect(lambda scheduler: scheduler.runner.tokens_computed))


@torch.inference_mode()
def along(model: PreTrainedModel, prompt: Sequence[int], written: Sequence[int]) -> torch.Tensor:
    """The model's own logits after the prompt and after each token of `written` but the last."""
    ids = torch.tensor([[*prompt, *written[:-1]]])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].double()


# -- sigma ------------------------------------------------------------------------------------------------


async def compared(session: Session, one: Sequence[int], other: Sequence[int], sharing: Sharing) -> float:
    return await similarity(session, await session.prefill(one), tuple(other), sharing)


@torch.inference_mode()
def sigma_apart(model: PreTrainedModel, one: Sequence[int], other: Sequence[int], alpha: float, layers: int) -> float:
    """The paper's formula on what transformers gives as hidden states; of the last layer before the final norm."""
    states = []
    for tokens in (one, other):
        last: list[torch.Tensor] = []
        hook = model.model.layers[-1].register_forward_hook(lambda _m, _i, out, last=last: last.append(out))
        found = model(input_ids=torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True).hidden_states
        hook.remove()
        states.append([*found[1:-1], last[0]])
    weights = torch.exp(torch.tensor([alpha * (layer + 1) / layers for layer in range(layers)]))
    cosines = [torch.cosine_similarity(states[0][n][0, -1], states[1][n][0, -1], dim=0) for n in range(layers)]
    return float(((weights / weights.sum()) * torch.stack(cosines)).sum())


@pytest.mark.parametrize("gate", ["sigma", "early-sigma", "tokens"])
def test_sigma_is_1_for_equal_tokens_and_less_for_others(reasoner: RKSCReasoner, gate: Any) -> None:
    sharing = Sharing(mode="semantic", gate=gate)
    same = within(reasoner, lambda s: compared(s, PROMPTS[0], PROMPTS[0], sharing))
    assert same == pytest.approx(1.0, abs=1e-6)
    assert same <= 1.0 or gate != "tokens"
    others = [within(reasoner, lambda s, p=p: compared(s, PROMPTS[0], p, sharing)) for p in PROMPTS[1:]]
    assert all(value < 0.999 for value in others)
    assert others[0] != others[1]


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "LFM2 (hybrid)"])
@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_sigma_is_that_of_the_model_alone(name: str, alpha: float) -> None:
    changes = {"layer_types": ["conv", "full_attention", "conv", "conv"]} if "LFM2" in name else {}
    model, twin = (
        tiny_model(name, vocab_size=len(TOKENIZER), num_hidden_layers=4, **changes) for _ in range(2)
    )  # a quarter is one layer
    with asking(model) as reasoner:
        for gate, layers in (("sigma", 4), ("early-sigma", 1)):
            sharing = Sharing(mode="semantic", gate=gate, alpha=alpha)
            got = within(reasoner, lambda s, g=sharing: compared(s, PROMPTS[0], PROMPTS[1], g))
            assert got == pytest.approx(sigma_apart(twin, PROMPTS[0], PROMPTS[1], alpha, layers), abs=1e-5)


def test_sigma_weighs_later_layers_more() -> None:
    mine = {1: torch.tensor([1.0, 0.0]), 2: torch.tensor([1.0, 0.0])}
    theirs = {1: torch.tensor([0.0, 1.0]), 2: torch.tensor([2.0, 0.0])}
    assert sigma(mine, theirs, 0.0) == pytest.approx(0.5)
    assert sigma(mine, theirs, 2.0) == pytest.approx(math.e**2 / (math.e + math.e**2))


@pytest.mark.parametrize(("gate", "reached"), [("sigma", DEEP), ("early-sigma", DEEP // 4), ("tokens", 0)])
def test_a_gate_computes_the_layers_that_it_needs(gate: Any, reached: int) -> None:
    model = model_of()
    layers: list[int] = []

    async def ask(session: Session) -> int:
        runner = session._work.scheduler.runner
        first = await session.prefill(PROMPTS[0])
        hooks = [
            layer.register_forward_hook(lambda _m, _i, _o, n=number: layers.append(n))
            for number, layer in enumerate(model.model.layers, 1)
        ]
        before = runner.tokens_computed
        await similarity(session, first, PROMPTS[1], Sharing(mode="semantic", gate=gate))
        for hook in hooks:
            hook.remove()
        return runner.tokens_computed - before

    with asking(model) as reasoner:
        tokens = within(reasoner, ask)
    assert layers == list(range(1, reached + 1))
    # the prompt beyond what it shares with the first, and the first one's last token again
    assert tokens == (0 if gate == "tokens" else len(PROMPTS[1]) - common(*PROMPTS[:2]) + 1)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


# -- the gate -----------------------------------------------------------------------------------------------


def semantic(reasoner: RKSCReasoner, tau: float, **more: Any) -> ReasoningResult:
    reasoner.clear_cache()
    strategy = SelfConsistency(branches=2, stop=None, vote="majority")
    sharing = Sharing(mode="semantic", tau=tau, **more)
    return reasoner.reason(ASKED, phrasings=[LIKE], strategy=strategy, sharing=sharing)


@pytest.mark.parametrize("gate", ["sigma", "early-sigma", "tokens"])
def test_tau_decides_between_the_first_prompts_kv_and_its_own(reasoner: RKSCReasoner, gate: Any) -> None:
    measured = semantic(reasoner, 1.0, gate=gate).branches[1].sharing.sigma
    assert measured is not None
    below = semantic(reasoner, measured - 1e-7, gate=gate)
    above = semantic(reasoner, measured + 1e-7, gate=gate)
    one, like = PROMPTS[:2]
    assert below.branches[1].sharing == SharingRecord(mode="semantic", sigma=measured, reused=len(one), recomputed=0)
    own = len(like) - common(one, like)
    assert above.branches[1].sharing == SharingRecord(
        mode="semantic", sigma=measured, reused=common(one, like), recomputed=own
    )
    assert below.usage.prompt_tokens_computed == len(one)
    assert above.usage.prompt_tokens_computed == len(one) + own
    for result in (below, above):
        assert result.branches[0].sharing == SharingRecord(sigma=1.0, reused=0, recomputed=len(one))
    assert below.branches[1].tokens == below.branches[0].tokens  # greedy, from the same prompt
    assert above.branches[1].tokens == reasoner.reason(LIKE, strategy="direct").branches[0].tokens
    assert above.branches[1].tokens != above.branches[0].tokens


def test_models_without_hidden_states_to_look_at_say_so() -> None:
    with scripted_reasoner({ASKED: "4", LIKE: "5"}) as reasoner:
        for gate in ("sigma", "early-sigma"):
            with pytest.raises(UnsupportedModelError, match="gate='tokens'"):
                semantic(reasoner, 0.5, gate=gate)
        accepted = semantic(reasoner, 0.5, gate="tokens")
        assert [branch.text for branch in accepted.branches] == ["4", "4"]
        refused = semantic(reasoner, 0.99, gate="tokens")
        assert [branch.text for branch in refused.branches] == ["4", "5"]


def test_a_prompt_that_repeats_the_first_one_is_not_more_than_alike(reasoner: RKSCReasoner) -> None:
    sharing = Sharing(mode="semantic", gate="tokens")
    four = within(reasoner, lambda s: compared(s, PROMPTS[0], tuple(PROMPTS[0]) * 4, sharing))
    assert four == pytest.approx(2 / 5)


# -- aligned ------------------------------------------------------------------------------------------------


def test_numbers_and_the_beginnings_of_runs_are_computed(reasoner: RKSCReasoner) -> None:
    digits = {token for token, text in ((t, TOKENIZER.decode([t])) for t in range(256)) if text.isdigit()}
    assert len(digits) == 10

    async def taken(session: Session, first: int) -> list[int]:
        found = await roots(session, PROMPTS[:2], Sharing(mode="aligned", first=first))
        graft = found[1].cursor.graft
        assert graft is not None
        assert all(graft.target[at] == graft.source[of] for at, of in graft.pairs)
        return [at for at, _ in graft.pairs]

    like = PROMPTS[1]
    number = next(at for at, token in enumerate(like) if token in digits)
    all_but = within(reasoner, lambda s: taken(s, 0))
    assert {number - 1, number + 1} <= set(all_but)
    assert number not in all_but
    start = common(*PROMPTS[:2]) + len("Tell me: i")
    assert min(all_but) == start
    reasoner.clear_cache()
    assert min(within(reasoner, lambda s: taken(s, 10))) == start + 10


@pytest.mark.parametrize("mode", ["exact", "aligned", "semantic"])
@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_the_records_add_up_to_the_prompts_and_to_the_usage(reasoner: RKSCReasoner, mode: Any, tau: float) -> None:
    strategy = SelfConsistency(branches=7, stop=None, vote="majority")
    sharing = Sharing(mode=mode, tau=tau, first=2)
    result = reasoner.reason(ASKED, phrasings=[LIKE, ASKED, OTHER], strategy=strategy, sharing=sharing)
    prompts = [PROMPTS[n] for n in (0, 1, 0, 2, 0, 1, 0)]
    records = [branch.sharing for branch in result.branches]
    for at, (record, prompt) in enumerate(zip(records, prompts, strict=True)):
        theirs = PROMPTS[0] if record.mode == "semantic" and (record.sigma or 0.0) >= tau else prompt
        assert record.reused + record.recomputed == len(theirs)
        assert record.mode == ("exact" if prompt == PROMPTS[0] else mode)
        if prompt in prompts[:at]:
            assert record.recomputed == 0
    assert sum(record.recomputed for record in records) == result.usage.prompt_tokens_computed
    if mode == "aligned":
        exactly = len(PROMPTS[1]) - common(*PROMPTS[:2])
        assert 0 < records[1].recomputed < exactly
        assert records[1].sigma is None
    if mode == "semantic":
        assert (records[1].recomputed == 0) is (tau == 0.0)


def test_branches_take_the_phrasings_in_turn(reasoner: RKSCReasoner) -> None:
    direct = [reasoner.reason(text, strategy="direct").branches[0] for text in (ASKED, LIKE, OTHER)]
    assert len({branch.tokens for branch in direct}) == 3
    for first in (None, 2):  # all at once, and in waves
        strategy = SelfConsistency(branches=5, stop=None, vote="majority", first=first)
        result = reasoner.reason(ASKED, phrasings=[LIKE, OTHER], strategy=strategy)
        assert [b.tokens for b in result.branches] == [direct[n].tokens for n in (0, 1, 2, 0, 1)]
        for branch, n in zip(result.branches, (0, 1, 2, 0, 1), strict=True):
            assert branch.logprobs == pytest.approx(direct[n].logprobs, abs=1e-4)


def test_a_phrasing_that_no_branch_takes_is_not_computed(reasoner: RKSCReasoner) -> None:
    for sharing in ("exact", "aligned", "semantic"):
        reasoner.clear_cache()
        result = reasoner.reason(ASKED, phrasings=[LIKE, OTHER], strategy=Direct(), sharing=sharing)
        assert result.usage.prompt_tokens_computed == len(PROMPTS[0])


@pytest.mark.parametrize("phrasings", [LIKE, {"role": "user", "content": LIKE}, 3, [3], [""], [{"role": "user"}]])
def test_phrasings_that_cannot_be(reasoner: RKSCReasoner, phrasings: Any) -> None:
    with pytest.raises(ConfigError):
        reasoner.reason(ASKED, phrasings=phrasings)


def test_sharing_that_cannot_be(reasoner: RKSCReasoner) -> None:
    with pytest.raises(ConfigError, match="mode"):
        reasoner.reason(ASKED, sharing="approximate")  # type: ignore[arg-type]
    for bad in ({"tau": 1.5}, {"first": -1}, {"shortest": 0}, {"alpha": -1.0}, {"gate": "cosine"}, {"taus": 1}):
        with pytest.raises(ConfigError):
            Sharing(**bad)


# -- exact sharing, when all is off ----------------------------------------------------------------------------


def test_every_mechanism_off_is_plain_sharing_bit_for_bit() -> None:
    sampling = Sampling(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)

    async def plainly(session: Session) -> list[tuple[Any, ...]]:
        root = await session.prefill(PROMPTS[0])
        done = await session.decode(session.fork(root, 4), sampling)
        return [(branch.tokens, branch.logprobs, branch.finish_reason) for branch in done]

    with asking(model_of()) as reasoner:
        expected = within(reasoner, plainly)
    for sharing in ("exact", "aligned", "semantic"):  # alike where there is one prompt
        with asking(model_of()) as reasoner:
            strategy = SelfConsistency(branches=4, stop=None, vote="majority")
            result = reasoner.reason(
                ASKED, strategy=strategy, sharing=sharing, exit="off", **sampling.model_dump(exclude={"stop"})
            )
        assert [(b.tokens, b.logprobs, b.finish_reason) for b in result.branches] == expected
        assert result.usage.prompt_tokens == result.usage.prompt_tokens_computed == len(PROMPTS[0])


# -- audits -----------------------------------------------------------------------------------------------------


def audited(reasoner: RKSCReasoner, sharing: Sharing, phrasing: str = LIKE, **more: Any) -> ReasoningResult:
    return reasoner.reason(ASKED, phrasings=[phrasing], strategy=ALL, sharing=sharing, **more)


@pytest.mark.parametrize("mode", ["aligned", "semantic"])
def test_an_audit_changes_nothing_but_what_it_adds(mode: Any) -> None:
    sharing = Sharing(mode=mode, tau=0.0, first=0)
    with asking(model_of()) as reasoner:
        without = audited(reasoner, sharing)
    with asking(model_of()) as reasoner:
        with_it = audited(reasoner, sharing.replace(audit=True))
    assert all(branch.sharing.kl is branch.sharing.agreement is None for branch in without.branches)
    assert with_it.usage == without.usage
    for one, other in zip(without.branches, with_it.branches, strict=True):
        assert other.sharing.kl is not None
        blank = other.sharing.model_copy(update={"kl": None, "agreement": None})
        assert other.model_copy(update={"sharing": blank}) == one
    assert with_it.branches[1].sharing.kl > 1e-4  # type: ignore[operator]
    assert (with_it.branches[0].sharing.kl, with_it.branches[0].sharing.agreement) == (0.0, 1.0)


def test_an_audit_of_what_lost_nothing_finds_nothing() -> None:
    """Of one layer, what a token takes does not depend on the tokens before it."""
    with asking(model_of(layers=1)) as reasoner:
        result = audited(reasoner, Sharing(mode="aligned", first=0, audit=True))
        record = result.branches[1].sharing
        assert record.reused > 40
        assert record.kl == pytest.approx(0.0, abs=1e-9)
        assert record.agreement == 1.0
        exact = audited(reasoner, Sharing(audit=True))
        assert [(b.sharing.kl, b.sharing.agreement) for b in exact.branches] == [(0.0, 1.0)] * 3


@pytest.mark.parametrize("count", [1, 5, AUDITED + 6])
def test_an_audit_is_what_the_model_alone_says(reasoner: RKSCReasoner, alone: PreTrainedModel, count: int) -> None:
    result = audited(reasoner, Sharing(mode="semantic", tau=0.0, audit=True), max_tokens=count)
    branch = result.branches[1]
    written = branch.tokens[:AUDITED]
    right, got = (along(alone, prompt, written).log_softmax(-1) for prompt in (PROMPTS[1], PROMPTS[0]))
    assert branch.sharing.kl == pytest.approx((right.exp() * (right - got)).sum(-1).mean().item(), rel=1e-3)
    same = (right.argmax(-1) == got.argmax(-1)).double().mean().item()
    assert branch.sharing.agreement == pytest.approx(same)


def test_an_audit_of_a_longer_prompt_stays_inside_the_context(reasoner: RKSCReasoner) -> None:
    longer = ASKED + " " + "Take your time over it. " * 7
    room = 256 - len(CODEC.encode(longer))
    assert 0 < room < AUDITED
    sharing = Sharing(mode="semantic", tau=0.0, gate="tokens", audit=True)
    result = audited(reasoner, sharing, longer, max_tokens=AUDITED + 10)
    assert len(result.branches[1].tokens) == AUDITED + 10
    assert result.branches[1].sharing.kl is not None


# -- verification --------------------------------------------------------------------------------------------


def follow(branch: Branch, prompt: Sequence[int]) -> tuple[int, ...]:
    line = (*prompt, *branch.tokens)
    return (*line, *CODEC.follow_up(ASKED, "Is the answer above correct? Reply YES or NO.", line))


@pytest.mark.parametrize("mode", ["exact", "aligned", "semantic"])
def test_verdicts_read_exact_kv_whatever_the_branch_was_written_on(alone: PreTrainedModel, mode: Any) -> None:
    strategy = BestOfN(branches=3, score="verifier")
    sharing = Sharing(mode=mode, first=0, tau=1.0)
    yes, no = (list(group) for group in verdict_tokens(CODEC))
    with asking(model_of()) as reasoner:
        result = reasoner.reason(ASKED, phrasings=[LIKE, OTHER], strategy=strategy, sharing=sharing)
        assert result.usage.prompt_tokens == sum(map(len, PROMPTS))  # what verification needs is not the prompt's
    assert result.rule == "verifier"
    if mode == "aligned":
        assert result.branches[1].sharing.reused > 40
    for branch, prompt in zip(result.branches, PROMPTS, strict=True):
        logits = along(alone, follow(branch, prompt), [0])[-1]
        odds = logits[yes].logsumexp(0) - logits[no].logsumexp(0)
        assert branch.verdict is not None
        assert branch.verdict.score == pytest.approx(torch.sigmoid(odds).item(), abs=1e-4)
        probe = len(follow(branch, prompt)) - len(prompt) - len(branch.tokens)
        assert branch.verdict.tokens_computed == probe + 1  # the branch's last token too


def test_a_branch_that_fills_the_context_can_be_verified_by_a_function() -> None:
    with asking(model_of(layers=2)) as reasoner:
        result = reasoner.reason(
            ASKED,
            phrasings=[LIKE],
            strategy=BestOfN(branches=2, score="verifier", verifier=CallableVerifier(lambda claim: 0.5)),
            sharing=Sharing(mode="aligned", first=0),
            max_tokens=400,
        )
    assert [len(p) + len(b.tokens) for p, b in zip(PROMPTS, result.branches, strict=False)] == [256, 256]
    assert [branch.verdict.score for branch in result.branches if branch.verdict is not None] == [0.5, 0.5]


class _InSteps(Strategy):
    """Starts a branch, goes on from it, and starts another."""

    name: ClassVar[str] = "in-steps"

    async def solve(self, problem: Problem) -> Outcome:
        for _ in range(2):
            start = await problem.start(1)
            first = len(problem.branches)
            async with problem.branching(start) as ended:
                async for _ in ended:
                    pass
            async with problem.branching([problem.cursors[first]], parents=[first]) as ended:
                async for _ in ended:
                    pass
        return Outcome(0, None)


def test_records_belong_to_the_branches_that_start_at_a_prompt(reasoner: RKSCReasoner) -> None:
    sharing = Sharing(mode="aligned", first=0, audit=True)
    result = reasoner.reason(ASKED, phrasings=[LIKE], strategy=_InSteps(), sharing=sharing)
    assert [branch.parent for branch in result.branches] == [None, 0, None, 2]
    assert [branch.sharing.mode for branch in result.branches] == ["exact", "exact", "aligned", "exact"]
    assert [branch.sharing.kl is None for branch in result.branches] == [False, True, False, True]
    assert result.branches[1].sharing == result.branches[3].sharing == SharingRecord()


# -- hints -------------------------------------------------------------------------------------------------------


def test_a_hint_goes_before_or_after_the_question() -> None:
    assert hinted("Why?", "Think.", "after") == "Why?\n\nThink."
    assert hinted("Why?", "Think.", "before") == "Think.\n\nWhy?"
    assert hinted("Why?", "", "before") == "Why?"


def test_of_a_conversation_the_last_user_message_takes_the_hint() -> None:
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Why?", "name": "me"},
        {"role": "assistant", "content": "Because"},
    ]
    before = [dict(message) for message in talk]
    changed = hinted(talk, "Think.", "after")
    assert changed == [*talk[:2], {"role": "user", "content": "Why?\n\nThink.", "name": "me"}, talk[3]]
    assert talk == before
    assert hinted(talk, "", "after") is talk


@pytest.mark.parametrize("place", ["before", "after"])
def test_of_a_message_in_parts_the_hint_is_one_more(place: Any) -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    changed = hinted([{"role": "user", "content": parts}], "Think.", place)
    assert len(changed[0]["content"]) == 3  # type: ignore[index]
    assert CODEC.encode(changed) == CODEC.encode(hinted("Why?", "Think.", place))
    assert len(parts) == 2


def test_hints_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="user message"):
        hinted([{"role": "system", "content": "Be nice."}], "Think.", "after")
    for bad in ({"hints": "Think."}, {"hints": (3,)}, {"hint_place": "beside"}):
        with pytest.raises(ConfigError, match="hint"):
            SelfConsistency(**bad)
    for malformed in ("", [], ["Why?"], {"role": "user", "content": "Why?"}, b"Why?", 3, [{"role": "user"}]):
        with scripted_reasoner({}) as reasoner, pytest.raises(ConfigError):
            reasoner.reason(malformed, strategy=SelfConsistency(branches=2, hints=("Think.",)))  # type: ignore[arg-type]


def test_prompts_are_each_phrasing_with_each_hint() -> None:
    strategy = SelfConsistency(hints=("Think.", "", "Be brief."))
    assert strategy.prompts("A", ["B"]) == [
        "A\n\nThink.", "A", "A\n\nBe brief.", "B\n\nThink.", "B", "B\n\nBe brief.",
    ]  # fmt: skip
    before = strategy.replace(hints=("Think.",), hint_place="before")
    assert before.prompts("A", ["B"]) == ["Think.\n\nA", "Think.\n\nB"]
    assert SelfConsistency().prompts("A", ["B"]) == ["A", "B"]


def test_hinted_branches_answer_their_own_prompts() -> None:
    script = {"Q": "0", "Q\n\nThink.": "1", "R": "2", "R\n\nThink.": "3"}
    with scripted_reasoner(script) as reasoner:
        strategy = SelfConsistency(branches=6, stop=None, hints=("", "Think."))
        result = reasoner.reason("Q", phrasings=["R"], strategy=strategy)
        assert [branch.text for branch in result.branches] == ["0", "1", "2", "3", "0", "1"]


def test_after_the_question_a_hint_shares_it_exactly_and_before_it_by_alignment(reasoner: RKSCReasoner) -> None:
    hints = ("Think well about all of it.", "Be brief.")
    question = len(ASKED)
    reused = {}
    for place in ("before", "after"):
        for mode in ("exact", "aligned"):
            reasoner.clear_cache()
            strategy = ALL.replace(branches=2, hints=hints, hint_place=place)
            result = reasoner.reason(ASKED, strategy=strategy, sharing=Sharing(mode=mode, first=0))
            reused[place, mode] = result.branches[1].sharing.reused
    assert reused["after", "exact"] >= question
    assert reused["before", "exact"] < 10
    assert reused["before", "aligned"] > 0.8 * question
