"""Chains are a chat model with a strategy, between a prompt and a parser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain_core.load import dumpd, dumps, load
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_support import HI, SCRIPT, SIX, Recorder
from test_batch import ANSWERS, QUESTIONS, Held, few_passes

from langchain_rksc import ChatRKSC, SelfConsistencyChain, TreeOfThoughtChain, VerifiedAnswerChain
from langchain_rksc.chains import ReasoningChain
from rksc_agents import CallableVerifier, ConfigError, RKSCReasoner, SelfVerifier
from rksc_agents.testing import scripted_reasoner

PROMPT = ChatPromptTemplate.from_template("{question}")
TREE = {"depth": 2, "evaluator": "confidence"}
CHAINS = [
    (SelfConsistencyChain, {"branches": 5}, {"name": "self-consistency", "branches": 5}),
    (TreeOfThoughtChain, TREE, {"name": "tree-of-thought", **TREE}),
    (VerifiedAnswerChain, {"branches": 3}, {"name": "best-of-n", "score": "verifier", "branches": 3}),
]
VERIFYING = {**SCRIPT, "Is the answer above correct? Reply YES or NO.": {"YES": 2, "NO": 1}}


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted_reasoner(VERIFYING) as made:
        yield made


@pytest.fixture
def chat(reasoner: RKSCReasoner) -> ChatRKSC:
    return ChatRKSC(reasoner=reasoner)


@pytest.mark.parametrize(("kind", "settings", "strategy"), CHAINS)
def test_a_chain_answers_as_a_model_with_its_strategy(
    chat: ChatRKSC, kind: type[ReasoningChain], settings: dict[str, Any], strategy: dict[str, Any]
) -> None:
    for seed in range(4):
        chain = kind(llm=chat.model_copy(update={"seed": seed}), **settings)
        message = chain.invoke(SIX)
        assert message.content == chat.invoke(SIX, strategy=strategy, seed=seed).content
        assert message.response_metadata["rksc"]["strategy"] == strategy["name"]


def test_between_a_prompt_and_a_parser(chat: ChatRKSC) -> None:
    bare = SelfConsistencyChain(llm=chat, branches=3)
    whole = SelfConsistencyChain(llm=chat, branches=3, prompt=PROMPT, output_parser=StrOutputParser())
    answer = (PROMPT | bare | StrOutputParser()).invoke({"question": SIX})
    assert answer in SCRIPT[SIX]
    assert whole.invoke({"question": SIX}) == answer
    assert bare.invoke(PROMPT.invoke({"question": SIX})).content == answer
    assert bare.invoke([("user", SIX)]).content == answer


@pytest.mark.parametrize(("kind", "settings"), [each[:2] for each in CHAINS])
async def test_every_way_to_run_gives_the_same(
    chat: ChatRKSC, kind: type[ReasoningChain], settings: dict[str, Any]
) -> None:
    """Case 27: asynchronous as synchronous, and no call leaves anything behind for the next."""
    chain = kind(llm=chat, prompt=PROMPT, output_parser=StrOutputParser(), **settings)
    inputs = [{"question": SIX}, {"question": HI}]
    answers = [chain.invoke(each) for each in inputs]
    assert [chain.invoke(each) for each in inputs] == answers
    assert chain.batch(inputs) == answers
    assert await chain.abatch(inputs) == answers
    assert [await chain.ainvoke(each) for each in inputs] == answers
    assert ["".join(chain.stream(each)) for each in inputs] == answers
    assert ["".join([piece async for piece in chain.astream(each)]) for each in inputs] == answers


def test_a_batch_keeps_its_failures_apart(chat: ChatRKSC) -> None:
    chain = SelfConsistencyChain(llm=chat, branches=2, prompt=PROMPT)
    good, bad = chain.batch([{"question": HI}, {"other": 1}], return_exceptions=True)
    assert good.content == "Hello there."
    assert isinstance(bad, KeyError)
    with pytest.raises(KeyError):
        chain.batch([{"question": HI}, {"other": 1}])
    assert chain.batch([]) == []


def test_a_batch_is_one_batch_of_the_engine(chat: ChatRKSC, reasoner: RKSCReasoner) -> None:
    held = Held(reasoner, 16)
    chain = SelfConsistencyChain(llm=chat, branches=8, prompt=PROMPT, output_parser=StrOutputParser())
    assert chain.batch([{"question": question} for question in QUESTIONS]) == ANSWERS
    assert few_passes(held)


async def test_so_is_an_asynchronous_one(chat: ChatRKSC, reasoner: RKSCReasoner) -> None:
    held = Held(reasoner, 16)
    chain = SelfConsistencyChain(llm=chat, branches=8)
    assert [message.content for message in await chain.abatch(QUESTIONS)] == ANSWERS
    assert few_passes(held)


def test_what_a_call_says_reaches_the_model(chat: ChatRKSC) -> None:
    chain = SelfConsistencyChain(llm=chat, branches=3, prompt=PROMPT, output_parser=StrOutputParser())
    asked = {"question": HI}
    assert chain.invoke(asked, max_tokens=2) == "He"
    assert chain.batch([asked], stop=["there"]) == ["Hello "]
    assert "".join(chain.stream(asked, max_tokens=2)) == "He"
    assert chain.bind(max_tokens=2).invoke(asked) == "He"
    with pytest.raises(ConfigError, match="branchs"):
        chain.invoke(asked, branchs=2)
    with pytest.raises(ConfigError, match="is a strategy"):
        chain.invoke(asked, strategy="direct")


async def test_a_stream_that_is_left_frees_its_rows(chat: ChatRKSC, reasoner: RKSCReasoner) -> None:
    chain = SelfConsistencyChain(llm=chat, branches=3)
    async for _ in chain.astream("Long?", max_tokens=400, stream_reasoning=True):
        break
    stream = chain.stream("Long?", max_tokens=400, stream_reasoning=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]

    def freed() -> bool:
        reasoner.clear_cache()
        return reasoner.kv_bytes == 0

    for _ in range(500):
        if freed():
            break
        await asyncio.sleep(0.01)
    assert freed()


def test_what_it_takes_and_gives() -> None:
    chain = SelfConsistencyChain(prompt=PROMPT, output_parser=StrOutputParser())
    assert chain.get_input_jsonschema()["required"] == ["question"]
    assert chain.get_output_jsonschema()["type"] == "string"


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_settings_are_written_down_and_read_again() -> None:
    chain = TreeOfThoughtChain(llm={"temperature": 0.3}, depth=4, output_parser=StrOutputParser())
    written = json.loads(dumps(chain))
    assert written["id"] == ["langchain_rksc", "chains", "TreeOfThoughtChain"]
    classes = [TreeOfThoughtChain, ChatRKSC, StrOutputParser]
    read = load(written, valid_namespaces=["langchain_rksc"], allowed_objects=classes)
    assert isinstance(read, TreeOfThoughtChain)
    assert read.strategy == {"name": "tree-of-thought", "depth": 4}
    assert (read.llm.temperature, read.output_parser) == (0.3, StrOutputParser())
    strategy = SelfConsistencyChain(settings={"verifier": SelfVerifier(request="Right?")})
    assert dumpd(strategy)["kwargs"]["settings"] == {"verifier": {"request": "Right?"}}


class Tree(Recorder):
    """Notes the runs of chains too."""

    def __init__(self) -> None:
        super().__init__()
        self.chains: list[tuple[str, Any, Any]] = []
        self.models: list[tuple[Any, Any, Any]] = []

    def on_chat_model_start(self, *_: Any, run_id: Any, parent_run_id: Any = None, **more: Any) -> None:
        self.models.append((run_id, parent_run_id, more["tags"]))

    def on_chain_start(
        self, serialized: Any, inputs: Any, *, run_id: Any, parent_run_id: Any = None, **more: Any
    ) -> None:
        self.chains.append((more.get("name", ""), run_id, parent_run_id))


async def drained(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]


WAYS: dict[str, Any] = {
    "invoke": lambda chain, asked, config: chain.invoke(asked, config),
    "ainvoke": lambda chain, asked, config: asyncio.run(chain.ainvoke(asked, config)),
    "batch": lambda chain, asked, config: chain.batch([asked], config),
    "abatch": lambda chain, asked, config: asyncio.run(chain.abatch([asked], config)),
    "stream": lambda chain, asked, config: list(chain.stream(asked, config)),
    "astream": lambda chain, asked, config: asyncio.run(drained(chain.astream(asked, config))),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_one_run_of_the_chain_and_one_of_the_model(chat: ChatRKSC, way: str, whole: bool) -> None:
    """Parsers run as chains do; they are no run of a chain here."""
    tree = Tree()
    parts: dict[str, Any] = {"prompt": PROMPT, "output_parser": StrOutputParser()} if whole else {}
    chain = SelfConsistencyChain(llm=chat, branches=3, **parts)
    WAYS[way](chain, {"question": SIX} if whole else SIX, {"callbacks": [tree], "tags": ["mine"], "run_name": "told"})
    (name, run, parent), *below = tree.chains
    assert (name, parent) == ("told", None)
    assert [name for name, _, _ in below] == (["ChatPromptTemplate", "StrOutputParser"] if whole else [])
    ((model, under, tags),) = tree.models
    assert under == run
    assert tags == ["mine"]
    assert {event for event, _, run in tree.custom if run == model} == {"rksc_branch_end", "rksc_votes"}


def test_a_verifier_of_ones_own(chat: ChatRKSC) -> None:
    """Each of the two answers wins where the verifier says that it is right, whatever the model is confident of."""
    for right in ("41", "42"):
        verifier = CallableVerifier(lambda claim, right=right: float(claim.answer == right))  # type: ignore[misc]
        message = VerifiedAnswerChain(llm=chat, branches=12, verifier=verifier).invoke(SIX)
        assert message.content == f"It is {right}."
        assert message.response_metadata["rksc"]["verification"]["score"] == 1.0


def test_what_is_no_setting_is_refused(chat: ChatRKSC) -> None:
    with pytest.raises(ConfigError, match="brnches"):
        SelfConsistencyChain(llm=chat, brnches=3)
    with pytest.raises(ConfigError, match="branches"):
        SelfConsistencyChain(llm=chat, branches=0)
    with pytest.raises(ConfigError, match="score itself"):
        VerifiedAnswerChain(llm=chat, score="confidence")
    with pytest.raises(ConfigError, match="llm"):
        SelfConsistencyChain(llm=3)


def test_a_chain_needs_no_model_to_be_made() -> None:
    chain = SelfConsistencyChain(branches=3)
    assert chain.strategy == {"name": "self-consistency", "branches": 3}
    assert chain.llm.shared_engine is not None
    assert chain.llm.shared_engine.loaded is None
