"""What clients may send: OpenAI's fields, and `reasoning` beside them. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Text = Annotated[str, StringConstraints(max_length=1_000_000)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Reasoning(_Body):
    """How to reason: the strategy's name, and its settings, such as `branches`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    strategy: Text = "self-consistency"


class StreamOptions(_Body):
    """What a stream tells."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Common(_Body):
    """What both endpoints take."""

    model: Text
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    n: int | None = Field(default=None, ge=1, le=128)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, lt=1)
    user: Text | None = None
    reasoning: Reasoning | None = None
    frequency_penalty: Literal[0] | Annotated[float, Field(ge=0, le=0)] | None = None
    presence_penalty: Literal[0] | Annotated[float, Field(ge=0, le=0)] | None = None


class ChatRequest(_Common):
    """The body of ``/v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    logprobs: bool | None = False
    top_logprobs: Literal[0] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: Text | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    store: Literal[False] | None = None


class CompletionRequest(_Common):
    """The body of ``/v1/completions``; the prompt is read as it is, without a chat template."""

    prompt: Text
    echo: Literal[False] | None = None
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
