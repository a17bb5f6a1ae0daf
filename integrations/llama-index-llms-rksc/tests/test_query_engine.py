"""Answers over retrieved nodes: sources, order, votes, verification, what is reused, what is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from llama_index.core import Document, Settings
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import MockLLM
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index_support import listening
from tiny_models import tiny_model

from llama_index.llms.rksc import RKSC, RKSCQueryEngine, RKSCSynthesizer
from llama_index.llms.rksc.sources import DocumentOrder, cited, citing, numbered, stated
from llama_index.llms.rksc.synthesizer import SUPPORTED
from rksc_agents import ConfigError, EngineConfig, PromptTooLongError, RKSCReasoner, Sampling, Sharing, Verdict
from rksc_agents.model.text import TextCodec
from rksc_agents.testing import scripted_reasoner, scripted_tokenizer

MILL, BRIDGE, BAKER = (
    TextNode(id_=name, text=text, start_char_idx=at)
    for name, text, at in (
        ("mill", "The mill was built by Anna Keller.", 10),
        ("bridge", "The bridge was opened in 1902.", 20),
        ("baker", "Lena Brandt bakes bread.", 30),
    )
)
WHO = "Question: Who built the mill?"
SCRIPT = {
    WHO: {"Anna Keller did. [1]": 3, "Anna  Keller did [1].": 2, "Lena Brandt did. [2]": 2},
    "Question: When was the bridge opened?": "In 1902.",
}


class Fixed(BaseRetriever):
    """Always the same nodes."""

    def __init__(self, *nodes: TextNode) -> None:
        super().__init__()
        self.nodes = [NodeWithScore(node=node, score=1.0 - at / 10) for at, node in enumerate(nodes)]

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return list(self.nodes)


class Knowing:
    """A verifier that knows who built the mill."""

    name = "knowing"
    always = True

    async def verify(self, session: Any, claims: Sequence[Any], exit_rule: Any) -> list[Verdict]:
        return [Verdict(score=0.9 if "Keller" in claim.text else 0.1) for claim in claims]


def knowing(**settings: Any) -> Any:
    from rksc_agents import SelfConsistency

    return SelfConsistency(branches=8, vote="verifier", verifier=Knowing(), extract=stated, **settings)


@pytest.fixture
def llm() -> Iterator[RKSC]:
    with scripted_reasoner(SCRIPT) as reasoner:
        yield RKSC(reasoner=reasoner, max_tokens=60)


# -- sources ------------------------------------------------------------------------------------


def test_numbered_sources() -> None:
    assert numbered([" a ", "b"]) == "[1] a\n\n[2] b"
    assert cited("A [2]. B [1][2] and [7].", 3) == [1, 2]
    assert cited("none", 3) == []


@pytest.mark.parametrize(
    "text", ["Anna Keller did. [1]", "Anna Keller did [2].", " Anna  Keller did [1][2] ", "Anna Keller did."]
)
def test_answers_are_compared_apart_from_their_citations(text: str) -> None:
    assert stated(text) == "Anna Keller did"


def test_an_answer_of_citations_states_nothing() -> None:
    assert stated("[1] [2].") is None
    assert stated("It is 3.5 km. [1]") == "It is 3.5 km"


def test_document_order() -> None:
    nodes = [NodeWithScore(node=node, score=1.0) for node in (BAKER, MILL, BRIDGE)]
    ordered = DocumentOrder().postprocess_nodes(nodes)
    assert [scored.node.node_id for scored in ordered] == ["mill", "bridge", "baker"]


@pytest.mark.parametrize("sources", [1, 3, 12])
def test_what_must_cite_can_always_be_ended(sources: int) -> None:
    constraint = TextCodec(scripted_tokenizer()).grammars.compile(citing(sources).lark())
    closing = constraint.closing()
    assert closing is not None
    assert cited(TextCodec(scripted_tokenizer()).decode(closing), sources)


# -- answers ------------------------------------------------------------------------------------


async def test_branches_vote_by_what_the_sources_support(llm: RKSC) -> None:
    engine = RKSCQueryEngine(Fixed(BAKER, MILL), llm=llm, strategy=knowing())
    for response in (engine.query("Who built the mill?"), await engine.aquery("Who built the mill?")):
        assert stated(str(response)) == "Anna Keller did"
        assert [scored.node.node_id for scored in response.source_nodes] == ["mill", "baker"]
        record = response.metadata["rksc"]
        assert record["cites"] == [1]
        assert record["rule"] == "verifier"
        branches = record["per_branch"]
        assert len(branches) == 8
        assert sum(branch["winner"] for branch in branches) == 1
        won = next(branch for branch in branches if branch["winner"])
        assert won["text"] == str(response)
        assert won["supported"] == 0.9
        assert {branch["states"] for branch in branches} == {"Anna Keller did", "Lena Brandt did"}
        assert record["votes"][0]["weight"] == pytest.approx(
            0.9 * sum(branch["states"] == "Anna Keller did" for branch in branches)
        )
        assert set(response.metadata) == {"mill", "baker", "rksc"}


def test_the_model_is_asked_whether_the_sources_support_it(llm: RKSC) -> None:
    synthesizer = RKSCSynthesizer(llm, branches=3)
    strategy = synthesizer.strategy
    assert strategy.vote == "verifier"
    assert strategy.branches == 3
    assert strategy.verifier.request == SUPPORTED


def test_the_context_is_computed_once(llm: RKSC) -> None:
    engine = RKSCQueryEngine(Fixed(MILL, BAKER), llm=llm, strategy=knowing())
    with listening() as listener:
        record = engine.query("Who built the mill?").metadata["rksc"]
    usage = listener.of("LLMChatEndEvent")[0].response.raw["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert record["branches"] == 8
    result = listener.of("LLMChatEndEvent")[0].response.result
    assert result.usage.prompt_tokens_computed == usage["prompt_tokens"]
    assert all(branch.sharing.recomputed == 0 for branch in result.branches[1:])


def test_questions_over_the_same_nodes_share_their_kv(llm: RKSC) -> None:
    """In document order the sources begin alike whatever the retriever ranks first."""

    def reused(order: Any) -> int:
        llm.reasoner.clear_cache()
        for nodes, question in (
            ((MILL, BRIDGE), "Who built the mill?"),
            ((BRIDGE, MILL), "When was the bridge opened?"),
        ):
            engine = RKSCQueryEngine(Fixed(*nodes), llm=llm, order=order, strategy="direct")
            tokens = engine.query(question).metadata["rksc"]["tokens_reused"]
        return int(tokens)

    assert reused("document") >= reused("score") + len(numbered([MILL.text, BRIDGE.text])) - 4


def test_citations_can_be_required(llm: RKSC) -> None:
    engine = RKSCQueryEngine(Fixed(BRIDGE, MILL), llm=llm, cite="required", strategy="direct")
    response = engine.query("When was the bridge opened?")
    assert str(response).startswith("In 1902.")  # the script says no more, so the rest is noise up to the citation
    assert response.metadata["rksc"]["cites"]


def test_what_the_prompt_says_of_citations(llm: RKSC) -> None:
    for cite, told in (("asked", True), ("required", True), ("off", False)):
        synthesizer = RKSCSynthesizer(llm, cite=cite)  # type: ignore[arg-type]
        template = synthesizer.get_prompts()["text_qa_template"]
        text = template.format(context_str="x", query_str="y")
        assert ("number of its source" in text) is told


def test_a_prompt_of_ones_own(llm: RKSC) -> None:
    template = PromptTemplate("{context_str}\nQuestion: {query_str}")
    engine = RKSCQueryEngine(Fixed(MILL), llm=llm, template=template, strategy="direct")
    with listening() as listener:
        engine.query("Who built the mill?")
    (message,) = listener.of("LLMChatStartEvent")[0].messages
    assert message.content == "[1] The mill was built by Anna Keller.\nQuestion: Who built the mill?"
    engine.update_prompts({"response_synthesizer:text_qa_template": PromptTemplate("Question: {query_str}")})
    with listening() as changed:
        engine.query("Who built the mill?")
    assert changed.of("LLMChatStartEvent")[0].messages[0].content == WHO


def test_nothing_retrieved(llm: RKSC) -> None:
    assert str(RKSCQueryEngine(Fixed(), llm=llm, empty_response="Nobody knows.").query("x")) == "Nobody knows."


def test_as_a_synthesizer_of_another_engine(llm: RKSC) -> None:
    engine = RetrieverQueryEngine(Fixed(MILL), RKSCSynthesizer(llm, strategy=knowing()))
    assert stated(str(engine.query("Who built the mill?"))) == "Anna Keller did"
    synthesizer = RKSCSynthesizer(llm, strategy="direct")
    answer = synthesizer.synthesize("Who built the mill?", [NodeWithScore(node=MILL)], temperature=0)
    assert "Keller" in str(answer)


def test_the_llm_of_the_settings(llm: RKSC) -> None:
    before = Settings._llm
    try:
        Settings.llm = llm
        assert "Keller" in str(RKSCQueryEngine(Fixed(MILL), strategy=knowing()).query("Who built the mill?"))
    finally:
        Settings._llm = before


def test_sources_that_do_not_fit_are_refused(llm: RKSC) -> None:
    """Case 23."""
    long = TextNode(text="word " * 2000)
    with pytest.raises(PromptTooLongError, match="4096"):
        RKSCQueryEngine(Fixed(long), llm=llm).query("Who built the mill?")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cite": "always"}, "cite = 'always'"),
        ({"order": "random"}, "order = 'random'"),
        ({"colour": "red"}, "RKSCQueryEngine has no argument 'colour'; it takes branches"),
        ({"sharing": "some"}, "Sharing.mode = 'some'"),
        ({"branches": 0}, "branches = 0"),
        ({"strategy": {"name": "guess"}}, "strategy = "),
    ],
)
def test_bad_settings_raise(llm: RKSC, settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RKSCQueryEngine(Fixed(MILL), llm=llm, **settings)


def test_other_llms_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs an RKSC"):
        RKSCQueryEngine(Fixed(MILL), llm=MockLLM())


# -- aligned ------------------------------------------------------------------------------------


def test_nodes_at_other_places_can_be_taken() -> None:
    tokenizer = scripted_tokenizer()
    model = tiny_model("Llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    sampling = Sampling(temperature=0, max_tokens=2, ignore_eos=True)
    config = EngineConfig(kv_budget=2**26, fast_linears=False)
    with RKSCReasoner.from_model(model, tokenizer, engine=config, sampling=sampling, strategy="direct") as reasoner:
        llm = RKSC(reasoner=reasoner)

        def reused(sharing: Any) -> int:
            reasoner.clear_cache()
            synthesizer = RKSCSynthesizer(llm, sharing=sharing, strategy="direct")
            for nodes in ((MILL, BRIDGE), (BRIDGE, MILL)):
                scored = [NodeWithScore(node=node) for node in nodes]
                response = synthesizer.synthesize("Who?", scored)
            return int(response.metadata["rksc"]["tokens_reused"])

        assert reused(Sharing(mode="aligned", first=4)) > reused(None) + 20
        assert reused({"mode": "aligned", "first": 4}) == reused(Sharing(mode="aligned", first=4))


def test_documents_of_many_kinds_have_their_place() -> None:
    nodes = [NodeWithScore(node=Document(text="b", id_="b")), NodeWithScore(node=Document(text="a", id_="a"))]
    assert [scored.node.node_id for scored in DocumentOrder().postprocess_nodes(nodes)] == ["a", "b"]
