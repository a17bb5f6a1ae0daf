"""An agent with two tools. Each turn computes its new tokens alone: the KV of the turns before is still there.

    python examples/langchain/agent.py
    python examples/langchain/agent.py --model Qwen/Qwen2.5-1.5B-Instruct --free

The default model, of 135M parameters, cannot choose among tools. So a middleware says which tool each turn calls, and
the model writes the arguments; `--free` leaves the choice to the model. The arguments follow the tools' schemas in both
cases, and with more than one branch the call is the one that most branches agree on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

from langchain_rksc import ChatRKSC

TASK = "A box holds 17 pens. How many pens are in 23 boxes? Multiply, then write the product in Roman numerals."
ROMAN = {1000: "M", 900: "CM", 500: "D", 400: "CD", 100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V"}
ROMAN |= {4: "IV", 1: "I"}


@tool
def multiply(first: int, second: int) -> int:
    """Multiply two numbers."""
    return first * second


@tool
def roman(number: int) -> str:
    """Write a number in Roman numerals."""
    text = ""
    for value, numeral in ROMAN.items():
        text += numeral * (number // value)
        number %= value
    return text


class Plan(AgentMiddleware):
    """Says which tool is called in which turn; after the last of them the model answers."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names

    def wrap_model_call(self, request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
        """Call the model with the turn's choice."""
        turn = sum(isinstance(message, AIMessage) for message in request.messages)
        choice = self.names[turn] if turn < len(self.names) else "none"
        return handler(request.override(tool_choice=choice))


def main(argv: Sequence[str] | None = None) -> list[AnyMessage]:
    """Run the task and show each turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--branches", type=int, default=3)
    parser.add_argument("--free", action="store_true", help="let the model choose the tools")
    options = parser.parse_args(argv)
    strategy = {"name": "self-consistency", "branches": options.branches}
    plan: list[AgentMiddleware[Any, Any]] = [] if options.free else [Plan("multiply", "roman")]
    with closing(ChatRKSC(model=options.model, strategy=strategy, temperature=0.3, max_tokens=48)) as chat:
        agent = create_agent(chat, [multiply, roman], middleware=plan)
        messages: list[AnyMessage] = agent.invoke({"messages": [HumanMessage(TASK)]})["messages"]
    for message in messages:
        match message:
            case AIMessage(usage_metadata=usage) if usage is not None:
                for call in message.tool_calls:
                    print(f"calls {call['name']}({call['args']})")
                if message.text:
                    print(f"says {message.text}")
                reused = usage["input_token_details"]["cache_read"]
                print(f"  prompt of {usage['input_tokens']} tokens, {reused} of them there already")
            case ToolMessage():
                print(f"  {message.name} returns {message.content}")
    print("Look at the tokens that were there already: from the second turn on they are all of the turns before.")
    return messages


if __name__ == "__main__":
    main()
