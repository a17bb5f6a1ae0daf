"""Steps of a ReAct agent as a grammar, so that also small models write steps that can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llama_index.core.tools.types import BaseTool

from llama_index.llms.rksc.tools import openai_tools
from rksc_agents.errors import ConfigError
from rksc_agents.model.grammar import JSONSchema, Lark

_STEP = re.compile(r"^(Action|Answer):.*", re.MULTILINE | re.DOTALL)


def react_grammar(tools: Sequence[BaseTool], *, thought: int = 300) -> Lark:
    """Return the grammar of one step: a thought in one line, then a call of a tool with valid arguments, or the answer.

    ::

        agent = ReActAgent(tools=tools, llm=RKSC(grammar=react_grammar(tools)))

    Parameters
    ----------
    tools : sequence of BaseTool
        What the agent may call, at least one.
    thought : int, default 300
        Characters that a thought may have, at least 1.

    Raises
    ------
    ConfigError
        If there are no tools, or something is none.
    """
    offered = [tool["function"] for tool in openai_tools(tools)]
    if not offered:
        raise ConfigError("tools = []: a ReAct agent without tools has nothing to act with; give at least one")
    if thought < 1:
        raise ConfigError(f"thought = {thought!r}: give a number of characters, 1 or more")
    names = [f"call_{at}" for at in range(len(offered))]
    lines = [
        f'start: "Thought: " /[^\\n]{{1,{thought}}}/ "\\n" (answer | {" | ".join(names)})',
        'answer: "Answer: " /(?s:.+)/',
    ]
    for name, tool in zip(names, offered, strict=True):
        head = json.dumps(f"Action: {tool['name']}\nAction Input: ")
        lines.append(f"{name}: {head} {name}_input")
        lines.append(f"{name}_input: %lark {{\n{JSONSchema(tool['parameters']).lark()}\n}}")
    return Lark("\n".join(lines))


def step_of(text: str) -> str | None:
    """What a step does, apart from its thought: what branches of an agent vote on, as their strategy's `extract`."""
    found = _STEP.search(text)
    return " ".join(found[0].split()) if found else None
