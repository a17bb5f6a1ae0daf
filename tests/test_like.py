"""Prompts that take KV from earlier prompts, and prompts that are rendered already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tiny_models import tiny_model

from rksc_agents import ConfigError, EngineConfig, Rendered, RKSCReasoner, Sampling, SelfVerifier
from rksc_agents.config import Sharing
from rksc_agents.model.grammar import Choice
from rksc_agents.model.text import TextCodec
from rksc_agents.reasoning import BestOfN, SelfConsistency
from rksc_agents.testing import scripted_tokenizer

TOKENIZER = scripted_tokenizer()
CODEC = TextCodec(TOKENIZER)
CHUNKS = ("The old mill by the river was built of grey stone. ", "A baker of the town sells bread in the square. ")
EARLIER = "".join(CHUNKS) + "Who sells bread?"
LATER = "".join(CHUNKS[::-1]) + "What is grey?"
ALIGNED = Sharing(mode="aligned", first=4)


@pytest.fixture(scope="module")
def shared() -> Iterator[RKSCReasoner]:
    model = tiny_model("Llama", vocab_size=len(TOKENIZER), max_position_embeddings=512)
    sampling = Sampling(temperature=0, max_tokens=4, ignore_eos=True)
    engine = EngineConfig(kv_budget=2**26, fast_linears=False)
    with RKSCReasoner.from_model(
        model, TOKENIZER, engine=engine, sampling=sampling, exit="off", strategy="direct"
    ) as made:
        yield made


@pytest.fixture
def reasoner(shared: RKSCReasoner) -> RKSCReasoner:
    shared.clear_cache()
    return shared


# -- like -----------------------------------------------------------------------------------------------


def test_chunks_of_an_earlier_prompt_are_taken_at_other_positions(reasoner: RKSCReasoner) -> None:
    exact = reasoner.reason(LATER)
    reasoner.clear_cache()
    reasoner.reason(EARLIER)
    result = reasoner.reason(LATER, sharing=ALIGNED, like=[EARLIER])
    record = result.branches[0].sharing
    assert record.mode == "aligned"
    taken = sum(len(chunk) - ALIGNED.first for chunk in CHUNKS)
    assert record.reused >= taken - 8  # runs may split a character or two otherwise
    assert result.usage.prompt_tokens_reused == record.reused
    assert result.usage.prompt_tokens_computed < exact.usage.prompt_tokens_computed - taken + 8
    audited = reasoner.reason(LATER, sharing=ALIGNED.replace(audit=True), like=[EARLIER]).branches[0].sharing
    assert audited.kl is not None
    assert audited.kl < 0.1


def test_the_prompt_with_most_in_common_is_taken_from(reasoner: RKSCReasoner) -> None:
    other = "Nothing here is alike, but for " + CHUNKS[0]
    for prompt in (other, EARLIER):
        reasoner.reason(prompt)
    alone = reasoner.reason(LATER, sharing=ALIGNED, like=[other]).branches[0].sharing.reused
    for like in ([other, EARLIER], [EARLIER, other]):
        assert reasoner.reason(LATER, sharing=ALIGNED, like=like).branches[0].sharing.reused > alone


def test_nothing_is_computed_for_what_is_no_longer_cached(reasoner: RKSCReasoner) -> None:
    result = reasoner.reason(LATER, sharing=ALIGNED, like=[EARLIER])
    assert result.branches[0].sharing.mode == "exact"
    assert result.branches[0].sharing.sigma == 1.0
    assert result.usage.prompt_tokens_computed == len(CODEC.encode(LATER))
    assert result.text == reasoner.reason(LATER).text


def test_verification_never_uses_what_was_taken(reasoner: RKSCReasoner) -> None:
    judged = BestOfN(branches=2, score="verifier", verifier=SelfVerifier())
    exact = reasoner.reason(LATER, strategy=judged)
    reasoner.clear_cache()
    reasoner.reason(EARLIER)
    result = reasoner.reason(LATER, strategy=judged, sharing=ALIGNED, like=[EARLIER])
    if result.branches[0].tokens == exact.branches[0].tokens:
        got, right = result.branches[0].verdict, exact.branches[0].verdict
        assert got is not None
        assert right is not None
        assert got.score == pytest.approx(right.score, abs=1e-4)
    assert result.verification.verified == 2


def test_what_is_kept_serves_later_prompts_exactly(reasoner: RKSCReasoner) -> None:
    """A prompt with taken KV is good for itself alone: the next one computes what it needs."""
    reasoner.reason(EARLIER)
    reasoner.reason(LATER, sharing=ALIGNED, like=[EARLIER])
    again = reasoner.reason(LATER)
    assert again.branches[0].sharing.mode == "exact"
    assert again.usage.prompt_tokens_reused < len(CHUNKS[1])


@pytest.mark.parametrize("sharing", [None, "exact", "semantic"])
def test_like_needs_aligned_sharing(reasoner: RKSCReasoner, sharing: Any) -> None:
    with pytest.raises(ConfigError, match=r"like = 1 prompts.*sharing='aligned'"):
        reasoner.reason(LATER, like=[EARLIER], sharing=sharing)


@pytest.mark.parametrize("like", [EARLIER, {"role": "user"}, 3])
def test_like_is_a_list(reasoner: RKSCReasoner, like: Any) -> None:
    with pytest.raises(ConfigError, match=r"like = .*list of earlier prompts"):
        reasoner.reason(LATER, like=like, sharing="aligned")


# -- rendered prompts -----------------------------------------------------------------------------------


def test_a_rendered_prompt_is_read_as_it_is() -> None:
    text = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "Hi."}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    assert CODEC.encode(Rendered(text)) == CODEC.encode("Hi.")
    assert CODEC.encode(Rendered(text)) != CODEC.encode(text)
    assert CODEC.encode(Rendered("Hi.")) == CODEC.encode_text("Hi.")


def test_a_rendered_prompt_begins_with_the_beginning_once() -> None:
    from tokenizers import processors

    tokenizer = scripted_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.convert_tokens_to_ids("<s>")
    backend: Any = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    codec = TextCodec(tokenizer)
    assert codec.encode(Rendered("<s>Hi.")) == codec.encode(Rendered("Hi."))
    assert codec.encode(Rendered("Hi."))[:1] == (bos,)
    assert list(codec.encode(Rendered("Hi."))).count(bos) == 1


def test_a_rendered_prompt_through_the_front_door(reasoner: RKSCReasoner) -> None:
    text = Rendered("<|user|>Hi.<|end|><|assistant|>")
    assert reasoner.reason(text).branches[0].tokens == reasoner.reason("Hi.").branches[0].tokens
    assert reasoner.count_prompt_tokens(text) == reasoner.count_prompt_tokens("Hi.")
    judged = reasoner.reason(text, strategy=BestOfN(branches=2, score="verifier"))
    assert judged.verification.verified == 2
    assert reasoner.reason(text, grammar=Choice("yes", "no"), max_tokens=8).text in ("yes", "no")


def test_what_a_rendered_prompt_has_no_place_for(reasoner: RKSCReasoner) -> None:
    text = Rendered("<|user|>Hi.<|end|><|assistant|>")
    with pytest.raises(ConfigError, match="no place for tools"):
        reasoner.reason(text, tools=[{"name": "add", "parameters": {"type": "object", "properties": {}}}])
    with pytest.raises(ConfigError, match="no place for a hint"):
        reasoner.reason(text, strategy=SelfConsistency(branches=2, hints=("Think.",)))
    with pytest.raises(ConfigError, match="empty"):
        reasoner.reason(Rendered(""))


def test_whether_a_model_chats(reasoner: RKSCReasoner) -> None:
    assert reasoner.is_chat_model
    bare = scripted_tokenizer()
    bare.chat_template = None
    assert not TextCodec(bare).is_chat
