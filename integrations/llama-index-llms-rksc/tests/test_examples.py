"""The examples run, on the default model, and show what they say that they show."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from llama_index.core.agent.workflow import AgentOutput, ToolCallResult
from llama_index.core.base.llms.types import ChatResponse
from llama_index.core.tools import FunctionTool

from llama_index.llms.rksc import RKSC
from llama_index.llms.rksc.sources import cited
from rksc_agents import RKSCReasoner
from rksc_agents.testing import scripted_reasoner

EXAMPLES = Path(__file__).parents[3] / "examples" / "llama_index"
NAMES = {"embeddings", "extract", "function_agent", "query_engine", "react_agent", "workflow"}

# LlamaIndex's agents use what pydantic and its own workflows have deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:is_running called from within a step:DeprecationWarning"),
]

Example = Callable[[str], ModuleType]


@pytest.fixture
def example(
    real_reasoner: RKSCReasoner, load_example: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Example]:
    """An example as a module, on the model that all tests share."""
    before = set(sys.modules)

    def shared(*, model: str, **settings: Any) -> RKSC:
        assert model == "smollm2-135m-instruct"
        return RKSC(reasoner=real_reasoner, **settings)

    def imported(name: str) -> ModuleType:
        real_reasoner.clear_cache()
        monkeypatch.syspath_prepend(EXAMPLES)
        module = load_example(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(module, "RKSC", shared)
        return module

    yield imported
    for name in NAMES & (set(sys.modules) - before):
        del sys.modules[name]


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == NAMES


def outputs(did: Sequence[ToolCallResult | AgentOutput]) -> list[dict[str, Any]]:
    """The usage of each turn of an agent."""
    turns = [each for each in did if isinstance(each, AgentOutput)]
    return [turn.raw["usage"] for turn in turns if isinstance(turn.raw, dict)]


def checked(did: Sequence[ToolCallResult | AgentOutput], tools: Sequence[FunctionTool]) -> list[tuple[str, str]]:
    """The calls of an agent and what they gave; their arguments fit the tools."""
    results = [each for each in did if isinstance(each, ToolCallResult)]
    known = {tool.metadata.name: tool.metadata.fn_schema for tool in tools}
    for result in results:
        schema = known[result.tool_name]
        assert schema is not None
        schema.model_validate(result.tool_kwargs)
        assert not result.tool_output.is_error
    return [(result.tool_name, result.tool_output.content) for result in results]


def assert_turns_reuse(used: Sequence[dict[str, Any]]) -> None:
    """Each turn found the prompt of the turn before, and what was answered to it but its last tokens."""
    for before, after in itertools.pairwise(used):
        known = before["prompt_tokens"] + before["completion_tokens"]
        assert after["prompt_tokens_details"]["cached_tokens"] > before["prompt_tokens"]
        assert after["prompt_tokens_details"]["cached_tokens"] <= known


@pytest.mark.real
def test_a_query_engine_cites_its_sources_and_reuses_them(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    responses = example("query_engine").main(["--branches", "2"])
    assert len(responses) == 2
    for response in responses:
        record = response.metadata["rksc"]
        names = [source.node.metadata["file_name"] for source in response.source_nodes]
        assert "mill.md" in names
        assert record["cites"] == cited(response.response, len(names)) != []
        assert len(record["per_branch"]) == 2
        assert all(branch["cites"] and 0 < branch["supported"] < 1 for branch in record["per_branch"])
    first, second = (response.metadata["rksc"]["tokens_reused"] for response in responses)
    assert first == 0
    assert second > 200
    assert "tokens of the prompt whose KV was there already: " in capsys.readouterr().out


@pytest.mark.real
def test_embeddings_find_what_shares_no_word(example: Example) -> None:
    pytest.importorskip("llama_index.embeddings.huggingface")
    response = example("embeddings").main(["--branches", "2"])
    assert [source.node.get_content() for source in response.source_nodes] == [
        "Money that you spent for the company is paid back within 10 days."
    ]
    assert response.response


@pytest.mark.real
def test_a_function_agent_calls_both_tools_and_computes_only_what_is_new(example: Example) -> None:
    module = example("function_agent")
    did = module.main([])
    assert checked(did, module.TOOLS) == [("multiply", "391"), ("roman", "CCCXCI")]
    used = outputs(did)
    assert len(used) == 4
    assert_turns_reuse(used)


@pytest.mark.real
def test_a_react_agent_writes_steps_that_can_be_read(example: Example) -> None:
    module = example("react_agent")
    did = module.main([])
    assert checked(did, module.TOOLS) == [("roman", "XLIV")]
    used = outputs(did)
    assert len(used) == 2
    assert_turns_reuse(used)
    last = did[-1]
    assert isinstance(last, AgentOutput)
    assert "XLIV" in (last.response.content or "")


@pytest.mark.real
def test_extraction_gives_a_validated_instance(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("extract")
    order = module.main(["--branches", "2"])
    assert isinstance(order, module.Order)
    first, second = capsys.readouterr().out.splitlines()
    assert first == repr(order)
    assert second.startswith("agreement of the branches: ")


@pytest.mark.real
def test_a_workflow_on_the_default_model(example: Example) -> None:
    found = example("workflow").main(["Tom has 3 apples and buys 4 more. How many apples has he?"])
    assert [response.raw["rksc"]["branches"] in (3, 9) for response in found] == [True]


async def test_a_workflow_thinks_harder_where_branches_disagree(example: Example) -> None:
    module = example("workflow")
    split = {f"It is {number}.": 1 for number in range(40)}
    with scripted_reasoner({"Easy?": "It is 7.", "Hard?": split}) as reasoner:
        found: list[ChatResponse] = await module.answers(RKSC(reasoner=reasoner), ["Easy?", "Hard?"])
    assert [response.raw["rksc"]["branches"] for response in found] == [3, 9]
