"""The examples run, on the default model, and show what they say that they show."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ToolMessage

from langchain_rksc import ChatRKSC
from rksc_agents import RKSCReasoner

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples" / "langchain"


Example = Callable[[str], ModuleType]


@pytest.fixture
def example(
    real_reasoner: RKSCReasoner, load_example: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> Example:
    """An example as a module, on the model that all tests share."""

    def shared(*, model: str, **settings: Any) -> ChatRKSC:
        assert model == "smollm2-135m-instruct"
        return ChatRKSC(reasoner=real_reasoner, **settings)

    def imported(name: str) -> ModuleType:
        real_reasoner.clear_cache()
        module = load_example(EXAMPLES / f"{name}.py")
        monkeypatch.setattr(module, "ChatRKSC", shared)
        return module

    return imported


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"agent", "batch_jsonl", "chain", "extract", "rag"}


def test_an_agent_uses_two_tools_and_computes_only_what_is_new(example: Example) -> None:
    messages = example("agent").main([])
    turns = [message for message in messages if isinstance(message, AIMessage)]
    called = [call["name"] for turn in turns for call in turn.tool_calls]
    assert called == ["multiply", "roman"]
    assert turns[-1].text
    results = [message for message in messages if isinstance(message, ToolMessage)]
    assert [(message.status, message.content) for message in results] == [("success", "391"), ("success", "CCCXCI")]
    used = [turn.usage_metadata for turn in turns]
    assert len(used) == 3
    for before, after in itertools.pairwise(used):
        assert before is not None
        assert after is not None
        written = before["output_tokens"] - before["output_token_details"]["reasoning"]
        # the whole prompt before, and the call that was made but its last tokens
        assert after["input_token_details"]["cache_read"] >= before["input_tokens"] + written - 3


def test_a_chain(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    example("chain").main(["How many legs has a cat?", "--branches", "2", "--max-tokens", "12"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split(" branches: ")[0] in ("1 of 2", "2 of 2")
    assert any(line.startswith("answer: ") for line in lines)


def test_extraction_gives_a_validated_instance(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    example("extract").main(["--branches", "2"])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Order(customer=")
    assert second.startswith("agreement of the branches: ")


def test_retrieval_finds_the_note_and_reuses_its_kv(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    rag = example("rag")
    retriever = rag.KeywordRetriever(documents=[Document(note) for note in rag.NOTES])
    assert [found.page_content for found in retriever.invoke("How long do new laptops take?")] == [rag.NOTES[3]]
    rag.main(["--max-tokens", "8"])
    figures = [line for line in capsys.readouterr().out.splitlines() if line.endswith("reused")]
    first, second = (int(line.split()[-2]) for line in figures)
    assert first == 0
    assert second > 40


def test_a_file_becomes_a_file(example: Example, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    data = ROOT / "tests" / "data" / "gsm8k_small.jsonl"
    arguments = ["--limit", "3", "--branches", "2", "--max-tokens", "8", "--out", str(out)]
    example("batch_jsonl").main([str(data), *arguments])
    questions = [json.loads(line)["question"] for line in data.read_text("utf-8").splitlines()[:3]]
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["question"] for row in rows] == questions
    assert all(row["answer"] for row in rows)
    assert list(tmp_path.iterdir()) == [out]


def test_a_question_that_fails_leaves_its_error(example: Example, tmp_path: Path, real_reasoner: RKSCReasoner) -> None:
    out, data = tmp_path / "answers.jsonl", tmp_path / "data.jsonl"
    asked = ["word " * real_reasoner.context, "Say hi."]
    data.write_text("\n".join(json.dumps({"question": text}) for text in asked), "utf-8")
    example("batch_jsonl").main([str(data), "--branches", "1", "--max-tokens", "4", "--out", str(out)])
    bad, good = (json.loads(line) for line in out.read_text("utf-8").splitlines())
    assert "context" in bad["error"]
    assert good["answer"]
