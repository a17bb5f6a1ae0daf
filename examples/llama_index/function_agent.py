"""A FunctionAgent with two tools. Each turn computes its new tokens alone: the KV of the turns before is still there.

    python examples/llama_index/function_agent.py
    python examples/llama_index/function_agent.py --model Qwen/Qwen2.5-1.5B-Instruct --free

The default model, of 135M parameters, cannot choose among tools. So each of two requests says which tool comes first,
and the model writes the arguments; `--free` leaves the choice to the model. The arguments follow the tools' schemas in
both cases, and the call is the one that most branches agree on. What the model says at last is its own.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import closing

from llama_index.core.agent.workflow import AgentInput, AgentOutput, FunctionAgent, ToolCallResult
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool

from llama_index.llms.rksc import RKSC

ROMAN = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V"}
ROMAN |= {4: "IV", 1: "I"}
REQUESTS = (
    ("multiply", "A box holds 17 pens. How many pens are in 23 boxes? Multiply."),
    ("roman", "Now write that product, 391, in Roman numerals."),
)


def multiply(first: int, second: int) -> int:
    """Multiply two numbers."""
    return first * second


def roman(number: int) -> str:
    """Write a number in Roman numerals."""
    text = ""
    for value, numeral in ROMAN.items():
        text += numeral * (number // value)
        number %= value
    return text


TOOLS = [FunctionTool.from_defaults(fn=function) for function in (multiply, roman)]


async def converse(llm: RKSC, free: bool) -> list[ToolCallResult | AgentOutput]:
    """Make the requests one after the other in one conversation; what the agent did."""
    memory = ChatMemoryBuffer.from_defaults(token_limit=4000, tokenizer_fn=llm.tokenizer)
    did: list[ToolCallResult | AgentOutput] = []
    for tool, request in REQUESTS:
        print(f"\n{request}")
        agent = FunctionAgent(
            tools=list(TOOLS),
            llm=llm,
            initial_tool_choice=None if free else tool,
            allow_parallel_tool_calls=False,
            streaming=False,
        )
        run = agent.run(request, memory=memory)
        async for event in run.stream_events():
            match event:
                case AgentInput():
                    print(f"  a turn over {len(event.input)} messages")
                case AgentOutput():
                    did.append(event)
                    usage = (event.raw or {})["usage"]
                    reused = usage["prompt_tokens_details"]["cached_tokens"]
                    print(f"  prompt of {usage['prompt_tokens']} tokens, {reused} of them there already")
                case ToolCallResult():
                    did.append(event)
                    print(f"  {event.tool_name}({event.tool_kwargs}) is {event.tool_output.content}")
        print(f"  {(await run).response.content}")
    return did


def main(argv: Sequence[str] | None = None) -> list[ToolCallResult | AgentOutput]:
    """Run the agent."""
    parser = argparse.ArgumentParser(description="A FunctionAgent with voted calls.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--branches", type=int, default=3)
    parser.add_argument("--free", action="store_true", help="let the model choose the tools")
    options = parser.parse_args(argv)
    strategy = {"name": "self-consistency", "branches": options.branches}
    with closing(RKSC(model=options.model, strategy=strategy, temperature=0.3, max_tokens=48)) as llm:
        return asyncio.run(converse(llm, options.free))


if __name__ == "__main__":
    main()
