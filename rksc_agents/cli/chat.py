"""``rksc chat``: a conversation whose history stays in the KV cache from turn to turn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from rksc_agents.cli import common, options, plans
from rksc_agents.cli.live import watch
from rksc_agents.config import DEFAULT_MODEL, EngineConfig
from rksc_agents.errors import ConfigError, RKSCError

if TYPE_CHECKING:
    from rksc_agents.reasoner import RKSCReasoner
    from rksc_agents.result import ReasoningResult
    from rksc_agents.types import Prompt

HELP = """\
/strategy NAME    how to reason from here on
/branches N       with how many branches; 0 is the strategy's default
/system TEXT      a system message; begins the conversation anew
/tree             the last run as a tree
/save FILE        keep the last run as a page (.html) or as data (.json)
/reset            begin the conversation anew
/help             this list
/quit             leave; so does the end of the input"""


def chat(
    *,
    model: common.Model = DEFAULT_MODEL,
    gguf_file: common.GGUFFile = None,
    strategy: plans.Name = "self-consistency",
    branches: plans.Branches = None,
    exits: options.Exit = "auto",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    stop: options.Stop = None,
    seed: options.Seed = None,
    system: options.System = None,
    kv_budget: options.KVBudget = None,
    int8: options.Int8 = False,
) -> None:
    """Talk with the model; each answer is reasoned with branches, and /help lists what else can be typed.

    Without a terminal each line of the input is a message or a command, and each answer is printed as text.
    """
    settings = options.sampling(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop=stop, seed=seed
    )
    plans.plan(strategy, branches=branches)  # a bad value is refused before a model is loaded
    if system is not None:
        common.utf8(system, "--system")
    engine = EngineConfig(kv_budget=options.kv_budget(kv_budget), int8=int8)
    with common.load_reasoner(model, gguf_file, engine=engine, exit=options.exit_of(exits)) as reasoner:
        Chat(reasoner, settings, strategy=strategy, branches=branches, system=system).run()


class Chat:
    """One conversation.

    Parameters
    ----------
    reasoner : RKSCReasoner
        Answers.
    settings : dict
        How tokens are drawn.
    strategy, branches, system
        What it begins with.
    """

    def __init__(
        self,
        reasoner: RKSCReasoner,
        settings: dict[str, Any],
        *,
        strategy: str = "self-consistency",
        branches: int | None = None,
        system: str | None = None,
    ) -> None:
        self.reasoner = reasoner
        self.settings = settings
        self.strategy = strategy
        self.branches = branches
        self.system = system
        self.history: list[dict[str, str]] = []
        self.last: ReasoningResult | None = None
        self._console = Console(highlight=False)
        self._seen = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Take lines until the input ends or /quit."""
        self._tell("/help lists what can be typed")
        while (line := self._line()) is not None:
            if line.strip() and not self._took(line.strip()):
                break

    def _line(self) -> str | None:
        if not self._seen:
            return sys.stdin.readline() or None
        try:
            return input("> ")
        except EOFError:
            return None
        except KeyboardInterrupt:  # what was typed is dropped
            self._tell("")
            return ""

    def _took(self, line: str) -> bool:
        """Do what a line says; false ends the conversation."""
        try:
            if not line.startswith("/"):
                self.say(line)
                return True
            name, _, rest = line.partition(" ")
            return self._command(name, rest.strip())
        except KeyboardInterrupt:  # the run is cancelled; the conversation is as it was before
            self._tell("stopped")
        except typer.BadParameter as error:
            common.say("error", error.message)
        except RKSCError as error:
            common.say("error", error)
        return True

    def say(self, text: str) -> ReasoningResult:
        """Ask in the conversation, show the answer, and keep both in the history."""
        asked = [*self.history, {"role": "user", "content": common.utf8(text, "the message")}]
        prompt: Prompt = asked if self.system is None else [{"role": "system", "content": self.system}, *asked]
        settings = {**self.settings, "strategy": plans.plan(self.strategy, branches=self.branches)}
        if self._seen:
            result = watch(self.reasoner, prompt, settings, self._console, keep=False)
        else:
            result = self.reasoner.reason(prompt, **settings)
        self.history = [*asked, {"role": "assistant", "content": result.text}]
        self.last = result
        self._show(result)
        return result

    def _show(self, result: ReasoningResult) -> None:
        from rksc_agents.printable import clean
        from rksc_agents.report.terminal import brief

        self._console.print(clean(result.text).strip(), markup=False, soft_wrap=True)
        self._tell(brief(result))

    def _command(self, name: str, rest: str) -> bool:
        match name:
            case "/strategy":
                plans.plan(rest, branches=self.branches)
                self.strategy = rest
            case "/branches":
                if not rest.isdecimal():
                    raise ConfigError(f"/branches {rest!r}: give a number, or 0 for the strategy's default")
                branches = int(rest) or None
                plans.plan(self.strategy, branches=branches)
                self.branches = branches
            case "/system":
                self.system, self.history = rest or None, []
            case "/reset":
                self.history = []
            case "/tree":
                self._console.print(self._done().trace)
            case "/save":
                self._done().trace.save(Path(rest))
            case "/help":
                typer.echo(HELP)
            case "/quit":
                return False
            case _:
                raise ConfigError(f"{name} is no command: /help lists them; a message cannot begin with a slash")
        return True

    def _done(self) -> ReasoningResult:
        if self.last is None:
            raise ConfigError("nothing was asked yet: ask something first")
        return self.last

    def _tell(self, text: str) -> None:
        if self._seen:
            self._console.print(text, style="dim", markup=False)
