"""What people hit with local models in LangChain, one test for each kind of fault."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

import rksc_agents
from langchain_rksc import ChatRKSC
from rksc_agents import BestOfN, EngineConfig, PromptTooLongError, RKSCReasoner, Sampling, SelfConsistency
from rksc_agents.model.text import TextCodec
from rksc_agents.testing import ScriptedRunner, scripted_tokenizer

Next = Callable[[str], str]
"""Maps the text so far to the next character; "" ends the answer."""


@contextmanager
def reasoner_of(
    next_character: Next, tokenizer: PreTrainedTokenizerFast | None = None, context: int = 4096
) -> Iterator[RKSCReasoner]:
    """A reasoner on a function in place of a model."""
    given = tokenizer if tokenizer is not None else scripted_tokenizer()
    size = len(given)

    def logits(tokens: tuple[int, ...]) -> torch.Tensor:
        character = next_character(str(given.decode(list(tokens))))
        token = given.encode(character, add_special_tokens=False)[0] if character else int(given.eos_token_id)
        return torch.nn.functional.one_hot(torch.tensor(token), size).float() * 30

    with RKSCReasoner(
        lambda budget: ScriptedRunner(logits, size, budget),
        TextCodec(given),
        name="function",
        context=context,
        kv_limit=2**24,
        strategy="direct",
        sampling=Sampling(temperature=0.0),
        engine=EngineConfig(),
    ) as reasoner:
        yield reasoner


def writes(answer: str) -> Next:
    """A model with one answer."""

    def next_character(text: str) -> str:
        written = text.rpartition("<|assistant|>")[2]
        return answer[len(written) :][:1] if answer.startswith(written) else ""

    return next_character


def seen_by(model: list[str]) -> Next:
    """A model that notes its prompt and says ok."""

    def next_character(text: str) -> str:
        prompt, _, written = text.rpartition("<|assistant|>")
        if not written:
            model.append(prompt)
        return "ok"[len(written) :][:1]

    return next_character


@tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"rain in {city}"


def test_1_tools_reach_the_prompt() -> None:
    prompts: list[str] = []
    with reasoner_of(seen_by(prompts)) as reasoner:
        ChatRKSC(reasoner=reasoner).bind_tools([weather]).invoke("Rain?")
    assert "weather" in prompts[0]
    assert "Tell the weather of a city." in prompts[0]


async def test_2_async_calls_leave_the_loop_free() -> None:
    """The loop goes on while the model is held in the middle of a pass."""
    reached, held = threading.Event(), threading.Event()

    def waits(text: str) -> str:
        reached.set()
        held.wait(20)
        return writes("ok")(text)

    with reasoner_of(waits) as reasoner:
        asked = asyncio.create_task(ChatRKSC(reasoner=reasoner).ainvoke("Hi"))
        while not reached.is_set():
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not asked.done()
        held.set()
        assert (await asked).content == "ok"


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def test_3_structured_output_is_a_validated_instance() -> None:
    """Also from a model that wants to write the letter a for ever."""
    with reasoner_of(lambda text: "a") as reasoner:
        chat = ChatRKSC(reasoner=reasoner, max_tokens=120)
        for method in ("json_schema", "function_calling"):
            assert isinstance(chat.with_structured_output(Person, method=method).invoke("Who?"), Person)


@pytest.mark.parametrize(
    "last",
    [
        ToolMessage("rain", tool_call_id="1"),
        AIMessage("It rai"),
        SystemMessage("Be brief."),
        HumanMessage("And now?"),
    ],
    ids=lambda message: message.type,
)
def test_4_a_conversation_may_end_with_any_message(last: Any) -> None:
    called = AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Rome"}, "id": "1"}])
    with reasoner_of(lambda text: "" if text.endswith("ok") else "ok"[text.endswith("o")]) as reasoner:
        answer = ChatRKSC(reasoner=reasoner).invoke([HumanMessage("Rain?"), called, last])
    assert answer.content == "ok"


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"
)


def test_5_roles_that_a_template_refuses_are_brought_into_its_shape() -> None:
    tokenizer = scripted_tokenizer()
    tokenizer.chat_template = STRICT
    prompts: list[str] = []
    with reasoner_of(seen_by(prompts), tokenizer) as reasoner:
        messages = [SystemMessage("Be brief."), HumanMessage("One."), HumanMessage("Two.")]
        assert ChatRKSC(reasoner=reasoner).invoke(messages).content == "ok"
    assert prompts[0].count("<|user|>") == 1
    assert all(text in prompts[0] for text in ("Be brief.", "One.", "Two."))


def test_6_a_model_without_a_chat_template_continues_text_and_says_so_once() -> None:
    tokenizer = scripted_tokenizer()
    tokenizer.chat_template = None
    with reasoner_of(lambda text: "" if text.endswith("ok") else "ok"[text.endswith("o")], tokenizer) as reasoner:
        chat = ChatRKSC(reasoner=reasoner)
        with pytest.warns(UserWarning, match="no chat template"):
            assert chat.invoke("Once upon a time").content == "ok"
        chat.invoke([HumanMessage("Hi"), AIMessage("Hi."), HumanMessage("Bye")])  # a second warning would be an error


def test_7_the_prompt_is_not_in_the_answer() -> None:
    with reasoner_of(writes("Say this twice.")) as reasoner:  # an answer that repeats the question is no prompt
        assert ChatRKSC(reasoner=reasoner).invoke("Say this twice.").content == "Say this twice."


def test_8_stop_texts_are_honoured_and_left_out() -> None:
    with reasoner_of(writes("one END two STOP three")) as reasoner:
        chat = ChatRKSC(reasoner=reasoner, stop=["STOP"])
        assert chat.invoke("Count.").content == "one END two "
        assert chat.invoke("Count.", stop=["END"]).content == "one "
        assert "".join(str(chunk.content) for chunk in chat.stream("Count.", stop=["END"])) == "one "


def test_9_an_agent_in_text_does_not_invent_its_observation() -> None:
    text = "Thought: look.\nAction: weather\nObservation: sun\nFinal Answer: sun"
    with reasoner_of(writes(text)) as reasoner:
        bound: Runnable[Any, Any] = ChatRKSC(reasoner=reasoner).bind(stop=["\nObservation:"])
        assert bound.invoke("Rain?").content == "Thought: look.\nAction: weather"


def test_10_each_branch_ends_for_itself() -> None:
    """One meets the stop text, one the end, one the limit; nobody ends the others."""
    answers = ("a STOP b", "ok", "x" * 50)

    def next_character(text: str) -> str:
        question, _, written = text.rpartition("<|assistant|>")
        answer = answers[int(question[-len("<|end|>") - 1])]
        return answer[len(written) :][:1]

    with reasoner_of(next_character) as reasoner:
        chat = ChatRKSC(reasoner=reasoner, stop=["STOP"], max_tokens=20)
        found = chat.batch(["Answer 0", "Answer 1", "Answer 2"])
    assert [answer.content for answer in found] == ["a ", "ok", "x" * 20]
    assert [answer.response_metadata["finish_reason"] for answer in found] == ["stop", "stop", "length"]


MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | tojson }}{% else %}"
    "{{ '<|' + m.role + '|>' + m.content }}{% endif %}{{ '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"
)


def test_18_calls_are_read_before_special_tokens_are_left_out() -> None:
    tokenizer = scripted_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = MISTRAL
    answer = '[{"name": "weather", "arguments": {"city": "Rome"}}]'

    def next_character(text: str) -> str:
        written = text.rpartition("<|assistant|>")[2]
        if not written:
            return "[TOOL_CALLS]"
        return answer[len(written) - len("[TOOL_CALLS]") :][:1]

    with reasoner_of(next_character, tokenizer) as reasoner:
        message = ChatRKSC(reasoner=reasoner).bind_tools([weather]).invoke("Rain?")
    assert message.content == ""
    assert [(call["name"], call["args"]) for call in message.tool_calls] == [("weather", {"city": "Rome"})]


def test_20_how_a_model_is_placed_is_passed_on_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class LoadingError(Exception):
        pass

    def from_pretrained(model: str, **options: Any) -> None:
        given.update(options, model=model)
        raise LoadingError

    monkeypatch.setattr(rksc_agents.RKSCReasoner, "from_pretrained", from_pretrained)
    quantization = object()
    chat = ChatRKSC(model="some/model", load_kwargs={"device_map": "auto", "quantization_config": quantization})
    with pytest.raises(LoadingError):
        chat.invoke("Hi")
    assert given["model"] == "some/model"
    assert given["device_map"] == "auto"
    assert given["quantization_config"] is quantization
    assert "device" not in given


def test_21_a_calls_value_beats_the_constructors() -> None:
    with reasoner_of(writes("abcdefgh")) as reasoner:
        chat = ChatRKSC(reasoner=reasoner, max_tokens=6)
        assert [chat.invoke("Go.").content, chat.invoke("Go.", max_tokens=3).content] == ["abcdef", "abc"]
        assert chat.bind(max_tokens=2).invoke("Go.").content == "ab"


def test_21_temperature_zero_is_greedy(scripted_chat: ChatRKSC) -> None:
    answers = {scripted_chat.invoke("Which?", temperature=0, seed=seed).content for seed in range(12)}
    assert answers == {"often"}
    assert len({scripted_chat.invoke("Which?", temperature=1.0, seed=seed).content for seed in range(12)}) == 2


@pytest.fixture
def scripted_chat() -> Iterator[ChatRKSC]:
    from rksc_agents.testing import scripted_reasoner

    with scripted_reasoner({"Which?": {"often": 2, "seldom": 1}}, strategy="direct") as reasoner:
        yield ChatRKSC(reasoner=reasoner)


def test_23_a_prompt_that_is_too_long_is_refused_with_both_numbers() -> None:
    with reasoner_of(writes("ok"), context=120) as reasoner:
        chat = ChatRKSC(reasoner=reasoner)
        with pytest.raises(PromptTooLongError) as refused:
            chat.invoke("a" * 200)
        assert (refused.value.limit, refused.value.tokens > 200) == (120, True)
        # cut on request, by LangChain's own means and the model's own tokenizer
        messages = [HumanMessage("a" * 80), AIMessage("b" * 40), HumanMessage("c" * 30)]
        kept = trim_messages(messages, max_tokens=100, token_counter=chat, start_on="human")
        assert [message.content for message in kept] == ["c" * 30]
        assert chat.invoke(kept).content == "ok"


def test_24_the_model_says_that_it_can_call_tools() -> None:
    profile = ChatRKSC().profile
    assert profile is not None
    assert profile["tool_calling"]
    assert profile["structured_output"]
    assert not profile["image_inputs"]


async def test_27_strategies_remember_nothing_and_async_is_like_sync() -> None:
    from rksc_agents.testing import scripted_reasoner

    strategy = SelfConsistency(branches=5, stop=None)
    with scripted_reasoner({"A?": {"It is 1.": 2, "It is 2.": 1}, "B?": "It is 3."}) as reasoner:
        chat = ChatRKSC(reasoner=reasoner, strategy=strategy)
        first = chat.invoke("A?")
        chat.invoke("B?")
        again, later = chat.invoke("A?"), await chat.ainvoke("A?")
    votes = [message.response_metadata["rksc"]["votes"] for message in (first, again, later)]
    assert votes[0] == votes[1] == votes[2]
    assert first.content == again.content == later.content


def test_28_what_changes_the_answer_changes_the_key_of_the_cache(scripted_chat: ChatRKSC) -> None:
    cache = InMemoryCache()
    chat = scripted_chat.model_copy(update={"cache": cache})
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.1},
        {"temperature": 0.9},
        {"n": 2},
        {"seed": 5},
        {"strategy": "best-of-n"},
        {"strategy": BestOfN(branches=3)},
        {"max_tokens": 3},
        {"stop": ["x"]},
    ]
    for options in asked:
        chat.invoke("Which?", **options)
    assert len(cache._cache) == len(asked)
    for options in asked:
        chat.invoke("Which?", **options)
    assert len(cache._cache) == len(asked)
