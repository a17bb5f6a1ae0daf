"""A ReActAgent, with a model so small that only a grammar keeps its steps in form.

    python examples/llama_index/react_agent.py

A ReAct agent reads its model's steps out of plain text: a thought, then an action with its input as JSON. A grammar
makes sure of that form, and of arguments that fit the tools; two solved examples show the model what a step is about;
`stop` ends a step before the model invents what the tool returns. Each step computes only what is new in its prompt.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import closing

from function_agent import TOOLS
from llama_index.core.agent.workflow import AgentOutput, ReActAgent, ToolCallResult
from llama_index.core.llms import ChatMessage, MessageRole

from llama_index.llms.rksc import RKSC, react_grammar

TASK = "Write 44 in Roman numerals."
STEPS = (
    ("What is 6 times 7?", "I multiply.", "multiply", '{"first": 6, "second": 7}', "42", "6 times 7 is 42."),
    ("Write 9 in Roman numerals.", "I convert it.", "roman", '{"number": 9}', "IX", "9 is IX."),
)


def solved() -> list[ChatMessage]:
    """Solved tasks, as an agent's history has them."""
    history: list[ChatMessage] = []
    for task, thought, tool, arguments, result, answer in STEPS:
        action = f"Thought: {thought}\nAction: {tool}\nAction Input: {arguments}"
        final = f"Thought: I can answer without using any more tools.\nAnswer: {answer}"
        texts = (task, action, f"Observation: {result}", final)
        history += [
            ChatMessage(role=MessageRole.ASSISTANT if at % 2 else MessageRole.USER, content=text)
            for at, text in enumerate(texts)
        ]
    return history


async def converse(llm: RKSC, task: str) -> list[ToolCallResult | AgentOutput]:
    """Run one task; what the agent did."""
    agent = ReActAgent(tools=list(TOOLS), llm=llm, streaming=False)
    did: list[ToolCallResult | AgentOutput] = []
    run = agent.run(task, chat_history=solved(), max_iterations=6)
    async for event in run.stream_events():
        match event:
            case AgentOutput():
                did.append(event)
                usage = (event.raw or {})["usage"]
                print(event.response.content)
                reused = usage["prompt_tokens_details"]["cached_tokens"]
                print(f"  prompt of {usage['prompt_tokens']} tokens, {reused} of them there already")
            case ToolCallResult():
                did.append(event)
                print(f"  {event.tool_name}({event.tool_kwargs}) is {event.tool_output.content}")
    await run
    return did


def main(argv: Sequence[str] | None = None) -> list[ToolCallResult | AgentOutput]:
    """Run the agent."""
    parser = argparse.ArgumentParser(description="A ReActAgent with steps in form.")
    parser.add_argument("task", nargs="?", default=TASK)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args(argv)
    settings = {"strategy": "direct", "temperature": 0.0, "max_tokens": 80, "stop": ["\nObservation:"]}
    with closing(RKSC(model=options.model, grammar=react_grammar(TOOLS, thought=80), **settings)) as llm:
        return asyncio.run(converse(llm, options.task))


if __name__ == "__main__":
    main()
