"""A LlamaIndex agent whose tool calls are voted on.

    python examples/09_llama_index_agent.py

The default model is too small to choose among tools, so it is told which one comes first; it writes the arguments.
`examples/llama_index/function_agent.py` has two tools and leaves the choice to larger models.
"""

import asyncio
from contextlib import closing

from llama_index.core.agent.workflow import FunctionAgent

from llama_index.llms.rksc import RKSC


def multiply(first: int, second: int) -> int:
    """Multiply two numbers."""
    return first * second


async def ask(llm: RKSC) -> None:
    """Run the agent once."""
    agent = FunctionAgent(
        tools=[multiply],
        llm=llm,
        initial_tool_choice="multiply",
        allow_parallel_tool_calls=False,
        streaming=False,
    )
    output = await agent.run("A box holds 17 pens. How many pens are in 23 boxes? Multiply.")
    for call in output.tool_calls:
        print(f"{call.tool_name}({call.tool_kwargs}) is {call.tool_output.content}")
    print(output.response.content)


strategy = {"name": "self-consistency", "branches": 3}
with closing(RKSC(model="smollm2-135m-instruct", strategy=strategy, temperature=0.3, max_tokens=48)) as llm:
    asyncio.run(ask(llm))
