"""ReAct agents: steps in form, stops, votes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llama_index.core.agent.react.output_parser import ReActOutputParser
from llama_index.core.agent.react.types import ActionReasoningStep, ResponseReasoningStep
from llama_index.core.agent.workflow import AgentOutput, ReActAgent, ToolCallResult
from llama_index.core.tools import FunctionTool
from llama_index_support import ADD, WEATHER, user
from pydantic import BaseModel
from tiny_models import tiny_model

from llama_index.llms.rksc import RKSC, react_grammar
from llama_index.llms.rksc.react import step_of
from rksc_agents import ConfigError, EngineConfig, RKSCReasoner, SelfConsistency
from rksc_agents.testing import scripted_reasoner, scripted_tokenizer

# LlamaIndex's agents use what pydantic and its own workflows have deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning"),
]


class Paint(BaseModel):
    """What and how to paint."""

    color: Literal["red", "light blue"]
    layers: list[int]


PAINT = FunctionTool.from_defaults(fn=lambda color, layers: "", name="paint", description="Paint.", fn_schema=Paint)
TOOLS = [ADD, WEATHER, PAINT]
CALL = 'Thought: I add.\nAction: add\nAction Input: {"a": 2, "b": 3}'
INVENTED = CALL + "\nObservation: 7\nThought: So.\nAnswer: It is 7."


@pytest.fixture(scope="module")
def random_reasoner() -> Iterator[RKSCReasoner]:
    """A random model, which knows nothing of steps."""
    tokenizer = scripted_tokenizer()
    model = tiny_model("Llama", vocab_size=len(tokenizer), max_position_embeddings=1024)
    with RKSCReasoner.from_model(model, tokenizer, engine=EngineConfig(kv_budget=2**26)) as reasoner:
        yield reasoner


async def run(agent: ReActAgent, task: str) -> list[Any]:
    handler = agent.run(task)
    did = [event async for event in handler.stream_events() if isinstance(event, AgentOutput | ToolCallResult)]
    await handler
    return did


@pytest.mark.parametrize("per_call", [False, True])
async def test_case_9_an_agent_does_not_invent_what_its_tools_return(per_call: bool) -> None:
    """The step ends before the invented observation, and the tool's own result is what the model goes on from."""
    stop = ["\nObservation:"]
    script = {"Add 2 and 3.": INVENTED, "Observation: 5": "Thought: I know.\nAnswer: It is 5."}
    with scripted_reasoner(script) as reasoner:
        settings: dict[str, Any] = {"strategy": "direct", "max_tokens": 200}
        llm = RKSC(reasoner=reasoner, **settings, **({} if per_call else {"stop": stop}))
        if per_call:
            assert llm.chat(user("Add 2 and 3."), stop=stop).message.content == CALL
            return
        did = await run(ReActAgent(tools=[ADD], llm=llm, streaming=False), "Add 2 and 3.")
    first, result, last = did
    assert first.response.content == CALL
    assert (result.tool_name, result.tool_kwargs, result.tool_output.content) == ("add", {"a": 2, "b": 3}, "5")
    assert last.response.content == "It is 5."


@pytest.mark.parametrize("seed", range(12))
def test_any_model_writes_steps_that_can_be_read(random_reasoner: RKSCReasoner, seed: int) -> None:
    """A random model's steps, as LlamaIndex's own parser reads them; their arguments fit the tools."""
    llm = RKSC(reasoner=random_reasoner, grammar=react_grammar(TOOLS, thought=20), strategy="direct", max_tokens=160)
    text = llm.chat(user("Do it."), temperature=1, seed=seed).message.content
    step = ReActOutputParser().parse(text or "")
    if isinstance(step, ResponseReasoningStep):
        assert text is not None
        assert "\nAnswer: " in text
        return
    assert isinstance(step, ActionReasoningStep)
    schemas = {tool.metadata.name: tool.metadata.get_parameters_dict() for tool in TOOLS}
    jsonschema.validate(step.action_input, schemas[step.action])


def test_the_grammar_steps_back_for_tools_and_objects() -> None:
    with scripted_reasoner({"Hm?": "Hello."}) as reasoner:
        llm = RKSC(reasoner=reasoner, grammar=react_grammar([ADD]), strategy="direct", max_tokens=120)
        assert (llm.chat(user("Hm?")).message.content or "").startswith("Thought: ")
        called = llm.chat_with_tools([ADD], "Hm?", tool_required=True)
        assert llm.get_tool_calls_from_response(called)[0].tool_name == "add"
        shape = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        assert json.loads(llm.chat(user("Hm?"), response_format=shape).message.content or "").keys() == {"a"}
        assert "grammar" not in llm.to_dict()


def test_branches_vote_on_what_a_step_does() -> None:
    other = 'Thought: Hm, adding.\nAction: add\nAction Input: {"a": 2, "b": 3}'
    wrong = 'Thought: I add.\nAction: add\nAction Input: {"a": 2, "b": 4}'
    with scripted_reasoner({"Add.": {CALL: 2, other: 2, wrong: 3}}) as reasoner:
        strategy = SelfConsistency(branches=12, stop=None, vote="majority", extract=step_of)
        record = RKSC(reasoner=reasoner, strategy=strategy, max_tokens=99).chat(user("Add.")).raw["rksc"]
    assert record["votes"][0]["answer"] == 'Action: add Action Input: {"a": 2, "b": 3}'
    assert len(record["votes"]) == 2


@given(st.text())
def test_steps_are_compared_apart_from_their_thoughts(thought: str) -> None:
    line = " ".join(thought.split())
    assert step_of(f"Thought: {line}\nAnswer: It is\n 5.") == "Answer: It is 5."


def test_a_text_that_is_no_step_has_no_vote() -> None:
    assert step_of("Hello.") is None


@pytest.mark.parametrize(
    ("arguments", "message"), [({"tools": []}, "tools = "), ({"tools": [ADD], "thought": 0}, "thought = 0")]
)
def test_bad_arguments_raise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        react_grammar(**arguments)
