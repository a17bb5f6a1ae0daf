"""A conversation on the command line: history, commands, what an error or an interrupt leaves behind."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rksc_agents import RKSCReasoner
from rksc_agents.cli import app
from rksc_agents.cli.chat import HELP, Chat
from rksc_agents.testing import scripted_reasoner

SCRIPT = {"Two and two?": "The answer is 4.", "And one more?": "The answer is 5.", "Hi": "Hello [b]you[/b]\x1b[2J."}


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted_reasoner(SCRIPT) as made:
        yield made


def piped(reasoner: RKSCReasoner, text: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[str, str]:
    monkeypatch.setattr("rksc_agents.cli.common.load_reasoner", lambda *_, **__: reasoner)
    done = CliRunner().invoke(app, ["chat", "--branches", "2", *options], input=text)
    assert done.exit_code == 0, done.output
    return done.stdout, done.stderr


def test_each_line_of_a_pipe_is_answered(reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = piped(reasoner, "Two and two?\n\n  And one more?  \nHi\n", monkeypatch)
    assert out == "The answer is 4.\nThe answer is 5.\nHello [b]you[/b][2J.\n"


def test_the_history_is_read_from_the_cache(reasoner: RKSCReasoner) -> None:
    chat = Chat(reasoner, {}, branches=2)
    first, second = chat.say("Two and two?"), chat.say("And one more?")
    assert [message["content"] for message in chat.history] == [
        "Two and two?", "The answer is 4.", "And one more?", "The answer is 5.",
    ]  # fmt: skip
    assert second.usage.prompt_tokens_reused >= first.usage.prompt_tokens + len("The answer is 4.") - 1
    assert second.usage.prompt_tokens_computed < first.usage.prompt_tokens + 8


def test_commands(reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page, data = tmp_path / "run.html", tmp_path / "run.json"
    typed = ["/tree", "Two and two?", "/tree", f"/save {page}", f"/save {data}", "/strategy direct", "/branches 3",
             "/strategy nonsense", "/branches x", "/nonsense", "/save run.txt", "/help", "/quit", "Hi"]  # fmt: skip
    out, told = piped(reasoner, "\n".join(typed), monkeypatch)
    assert "shared by 2 branches" in out
    assert HELP in out
    assert "Hello" not in out
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(data.read_text())["answer"] == "4"
    errors = told.splitlines()
    assert len(errors) == 6
    assert all(line.startswith("error: ") for line in errors)
    for line, part in zip(
        errors, ("nothing was asked", "branches", "nonsense", "'x'", "/nonsense", ".txt"), strict=True
    ):
        assert part in line


def test_a_new_system_message_and_a_reset_begin_anew(reasoner: RKSCReasoner) -> None:
    chat = Chat(reasoner, {}, branches=2, system="Be brief.")
    chat.say("Two and two?")
    assert chat._took("/reset")
    assert (chat.history, chat.system) == ([], "Be brief.")
    chat.say("Two and two?")
    assert chat._took("/system Be kind.")
    assert (chat.history, chat.system) == ([], "Be kind.")
    assert chat._took("/system")
    assert chat.system is None


def test_an_error_and_an_interrupt_leave_the_conversation_as_it_was(
    reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(reasoner, {}, branches=2)
    chat.say("Two and two?")
    before = list(chat.history)
    assert chat._took("Who knows?")
    assert capsys.readouterr().err.startswith("error: ")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reasoner, "reason", interrupted)
        assert chat._took("And one more?")
    assert chat.history == before
    chat.say("And one more?")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_branches_and_the_evidence(reasoner: RKSCReasoner, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    lines = iter(["Two and two?", KeyboardInterrupt, EOFError])

    def typed(_: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    Chat(reasoner, {}, branches=2).run()
    drawn = screen.getvalue()
    assert "votes: 4" in drawn
    assert "The answer is 4." in drawn
    assert "4 by 100% of the votes" in drawn
