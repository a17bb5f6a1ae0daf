"""A LangChain agent whose tool calls are voted on: the call that most branches make is made.

    python examples/07_langchain_agent.py

The default model is too small to choose among tools, so the first turn is told to call this one; the model writes the
arguments. `examples/langchain/agent.py` has two tools and leaves the choice to larger models.
"""

from collections.abc import Callable
from contextlib import closing

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool

from langchain_rksc import ChatRKSC


@tool
def multiply(first: int, second: int) -> int:
    """Multiply two numbers."""
    return first * second


@wrap_model_call
def multiply_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    """Call the tool in the first turn, and answer in the second."""
    answered = any(isinstance(message, AIMessage) for message in request.messages)
    return handler(request.override(tool_choice="none" if answered else "multiply"))


strategy = {"name": "self-consistency", "branches": 3}
with closing(ChatRKSC(model="smollm2-135m-instruct", strategy=strategy, temperature=0.3, max_tokens=48)) as chat:
    agent = create_agent(chat, [multiply], middleware=[multiply_first])
    task = HumanMessage("A box holds 17 pens. How many pens are in 23 boxes?")
    for message in agent.invoke({"messages": [task]})["messages"]:
        message.pretty_print()
