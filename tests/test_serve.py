"""The server, with the clients that people use: in this process, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from llama_index.llms.openai_like import OpenAILike
from typer.testing import CliRunner

from rksc_agents import RKSCReasoner
from rksc_agents.cli import app as cli
from rksc_agents.serve import Limits, make_app
from rksc_agents.serve.requests import ChatRequest
from rksc_agents.testing import scripted_reasoner

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCRIPT = {
    "Two and two?": ["The answer is 4."],
    "Weather in Rome?": CALL,
    "Write for long.": "word " * 400,
    "Surprise": ["The answer is 1.", "The answer is 2."],
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED: Any = [{"role": "user", "content": "Two and two?"}]


@pytest.fixture
def reasoner() -> Iterator[RKSCReasoner]:
    with scripted_reasoner(SCRIPT, strategy="direct") as made:
        yield made
        made.clear_cache()
        assert made.kv_bytes == 0  # nothing is claimed when all is over


def transport(reasoner: RKSCReasoner, **settings: Any) -> httpx.ASGITransport:
    return httpx.ASGITransport(make_app(reasoner, name="tiny", **settings), raise_app_exceptions=False)


@pytest.fixture
async def http(reasoner: RKSCReasoner) -> AsyncIterator[httpx.AsyncClient]:
    limits = Limits(body_bytes=20_000, max_tokens=2000, branches=8, in_flight=3, traces=2)
    async with httpx.AsyncClient(transport=transport(reasoner, limits=limits), base_url="http://rksc/v1") as client:
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://rksc/v1", http_client=http, max_retries=0)


# -- the official client ----------------------------------------------------------------------------


async def test_a_chat(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="tiny", messages=ASKED, logprobs=True, seed=1, temperature=0.5)
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == ("The answer is 4.", "stop")
    assert choice.logprobs is not None
    assert "".join(each.token for each in choice.logprobs.content or []).startswith("The answer is 4.")
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


@pytest.mark.parametrize("how", ["name", "field"])
async def test_a_strategy_is_chosen(client: openai.AsyncOpenAI, how: str) -> None:
    chosen: Any = {"model": "tiny@self-consistency:5"}
    if how == "field":
        chosen = {"model": "tiny", "extra_body": {"reasoning": {"strategy": "self-consistency", "branches": 5}}}
    reply = await client.chat.completions.create(messages=ASKED, **chosen)
    evidence = (reply.model_extra or {})["rksc"]
    assert (evidence["strategy"], evidence["branches"], evidence["votes"][0]["answer"]) == ("self-consistency", 5, "4")


async def test_streams(client: openai.AsyncOpenAI) -> None:
    for model in ("tiny", "tiny@self-consistency:3"):
        stream = await client.chat.completions.create(
            model=model, messages=ASKED, stream=True, stream_options={"include_usage": True}
        )
        pieces = [piece async for piece in stream]
        texts = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
        assert "".join(texts) == "The answer is 4."
        assert (len([text for text in texts if text]) > 1) == (model == "tiny")  # a vote is known at the end
        assert [piece.choices[0].finish_reason for piece in pieces if piece.choices][-1] == "stop"
        assert pieces[-1].usage is not None


async def test_several_choices(client: openai.AsyncOpenAI) -> None:
    asked: Any = [{"role": "user", "content": "Surprise"}]
    reply = await client.chat.completions.create(model="tiny", messages=asked, n=4)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert {choice.message.content for choice in reply.choices} <= {"The answer is 1.", "The answer is 2."}


@pytest.mark.parametrize("stream", [False, True])
async def test_tools(client: openai.AsyncOpenAI, stream: bool) -> None:
    asked: Any = [{"role": "user", "content": "Weather in Rome?"}]
    if stream:
        pieces = await client.chat.completions.create(model="tiny", messages=asked, tools=[TOOL], stream=True)
        found = [call async for piece in pieces for call in piece.choices[0].delta.tool_calls or []]
        (name, arguments) = (found[0].function.name, found[0].function.arguments)  # type: ignore[union-attr]
    else:
        reply = await client.chat.completions.create(model="tiny", messages=asked, tools=[TOOL])
        assert reply.choices[0].finish_reason == "tool_calls"
        (call,) = reply.choices[0].message.tool_calls or []
        (name, arguments) = (call.function.name, call.function.arguments)  # type: ignore[union-attr]
    assert (name, json.loads(arguments or "")) == ("weather", {"city": "Rome"})


async def test_structured_output(client: openai.AsyncOpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}, "strict": True}}
    reply = await client.chat.completions.create(model="tiny", messages=ASKED, response_format=schema)
    assert json.loads(reply.choices[0].message.content or "") in (True, False)


async def test_a_completion_reads_its_prompt_as_it_is(client: openai.AsyncOpenAI) -> None:
    prompt = "<|user|>Two and two?<|end|><|assistant|>"
    reply = await client.completions.create(model="tiny", prompt=prompt, logprobs=1)
    assert reply.choices[0].text == "The answer is 4."
    stream = await client.completions.create(model="tiny", prompt=prompt, stream=True)
    assert "".join([piece.choices[0].text async for piece in stream if piece.choices]) == "The answer is 4."


async def test_models_and_the_page_of_a_run(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    assert "tiny" in [model.id async for model in client.models.list()]
    ids = [(await client.chat.completions.create(model="tiny", messages=ASKED)).id for _ in range(3)]
    assert (await http.get(f"/runs/{ids[2]}")).text.startswith("<!doctype html>")
    assert (await http.get(f"/runs/{ids[0]}")).status_code == 404  # two are kept


async def test_langchains_client(http: httpx.AsyncClient) -> None:
    chat = ChatOpenAI(model="tiny", base_url="http://rksc/v1", api_key="none", http_async_client=http)  # type: ignore[arg-type]
    assert (await chat.ainvoke("Two and two?")).text == "The answer is 4."
    assert "".join([piece.text async for piece in chat.astream("Two and two?")]) == "The answer is 4."
    message = await chat.bind_tools([TOOL]).ainvoke("Weather in Rome?")
    assert isinstance(message, AIMessage)
    assert message.tool_calls[0]["args"] == {"city": "Rome"}


async def test_llama_indexs_client(http: httpx.AsyncClient) -> None:
    llm = OpenAILike(
        model="tiny", api_base="http://rksc/v1", api_key="none", is_chat_model=True, async_http_client=http
    )
    assert (await llm.acomplete("Two and two?")).text == "The answer is 4."


# -- what is wrong is told --------------------------------------------------------------------------

GOOD: dict[str, Any] = {"model": "tiny", "messages": ASKED}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "other"}, 404),
        ({"model": "tiny@nonsense"}, 400),
        ({"model": "tiny@self-consistency:x"}, 404),
        ({"model": "tiny@self-consistency:9"}, 400),
        ({"surprise": 1}, 400),
        ({"messages": []}, 400),
        ({"messages": "Hi"}, 400),
        ({"messages": [{"role": "nobody", "content": "x"}]}, 400),
        ({"messages": [{"role": "user", "content": "long " * 3000}]}, 400),
        ({"temperature": 1e300}, 400),
        ({"max_tokens": 2001}, 400),
        ({"max_tokens": -1}, 400),
        ({"n": 9}, 400),
        ({"seed": 2**70}, 400),
        ({"frequency_penalty": 0.5}, 400),
        ({"top_logprobs": 3}, 400),
        ({"tools": [{"name": "x"}]}, 400),
        ({"tool_choice": "nothing", "tools": [TOOL]}, 400),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, 400),
        ({"reasoning": {"strategy": "best-of-n", "verifier": "os:system"}}, 400),
        ({"reasoning": {"strategy": "best-of-n", "nonsense": 1}}, 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bad_request_is_told(
    http: httpx.AsyncClient, change: dict[str, Any], status: int, stream: bool
) -> None:
    reply = await http.post("/chat/completions", json={**GOOD, "stream": stream, **change})
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["message"]
    assert "Traceback" not in reply.text
    assert (await http.get("http://rksc/health")).json()["in_flight"] == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff\xfe", b"null", b"[1]", b'{"model": NaN}', b"[" * 9000, b'{"model": "tiny", "messages": "\xc3"}'],
)
async def test_a_malformed_body_is_told(http: httpx.AsyncClient, body: bytes) -> None:
    reply = await http.post("/chat/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]


ODD: list[Any] = [None, True, -1, 0, 1e308, 2**70, "", "x" * 1000, [], {}, [[]], {"a": {}}, "\0", "\ud800", [None], [1]]


@pytest.mark.parametrize("place", ["body", "message", "reasoning"])
async def test_odd_values_anywhere_are_answered_or_refused(http: httpx.AsyncClient, place: str) -> None:
    """Never an error of the server's own."""
    schema = ChatRequest.model_json_schema()
    fields = {
        "body": list(schema["properties"]),
        "message": ["role", "tool_calls", "tool_call_id", "name"],
        "reasoning": ["strategy", "branches", "vote", "stop", "hints", "warmup", "vote_temperature"],
    }[place]
    for field in fields:
        for value in ODD:
            body: dict[str, Any] = {**GOOD, "max_tokens": 4}
            if place == "body":
                body[field] = value
            elif place == "message":
                body["messages"] = [{**ASKED[0], field: value}]
            else:
                body["reasoning"] = {"strategy": "self-consistency", field: value}
            headers = {"content-type": "application/json"}
            reply = await http.post("/chat/completions", content=json.dumps(body), headers=headers)
            assert reply.status_code in (200, 400, 404), (field, value, reply.text)
    assert (await http.get("http://rksc/health")).json()["in_flight"] == 0


async def test_a_large_body_is_refused_whatever_it_says_of_itself(http: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10_000):
            yield b"x" * 1000

    for content in (b"x" * 10_000_000, pieces()):
        reply = await http.post("/chat/completions", content=content)
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, "invalid_request_error")


async def test_what_comes_while_all_is_full_is_asked_to_wait(http: httpx.AsyncClient, reasoner: RKSCReasoner) -> None:
    long = {**GOOD, "messages": [{"role": "user", "content": "Write for long."}], "max_tokens": 2000}
    running = [asyncio.ensure_future(http.post("/chat/completions", json=long)) for _ in range(3)]
    while (await http.get("http://rksc/health")).json()["in_flight"] < 3:
        await asyncio.sleep(0.01)
    reply = await http.post("/chat/completions", json=GOOD)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
    assert [each.status_code for each in await asyncio.gather(*running)] == [200, 200, 200]
    assert (await http.post("/chat/completions", json=GOOD)).status_code == 200
    figures = (await http.get("http://rksc/metrics")).text
    assert 'rksc_requests_total{outcome="answered"} 4' in figures
    assert 'rksc_requests_total{outcome="refused"} 1' in figures


async def test_a_request_that_takes_too_long_ends_and_frees_its_rows(reasoner: RKSCReasoner) -> None:
    limits = Limits(timeout_s=0.05)
    long = {**GOOD, "messages": [{"role": "user", "content": "Write for long."}], "max_tokens": 2000}
    async with httpx.AsyncClient(transport=transport(reasoner, limits=limits), base_url="http://rksc/v1") as http:
        reply = await http.post("/chat/completions", json=long)
        assert (reply.status_code, reply.json()["error"]["type"]) == (504, "server_error")
        streamed = await http.post("/chat/completions", json={**long, "stream": True})
        assert "took too long" in streamed.text
        assert (await http.get("http://rksc/health")).json()["in_flight"] == 0


@pytest.mark.parametrize("after", [0.0, 0.1])
async def test_a_client_that_leaves_frees_its_rows(reasoner: RKSCReasoner, after: float) -> None:
    """Its cancelled request is no request any more, streamed or not."""
    app = make_app(reasoner, name="tiny")
    for stream in (False, True):
        long = {**GOOD, "messages": [{"role": "user", "content": "Write for long."}], "max_tokens": 2000}
        body = json.dumps({**long, "stream": stream}).encode()
        sent, gone = asyncio.Event(), asyncio.Event()
        first = True

        async def receive() -> dict[str, Any]:
            nonlocal first
            if first:
                first = False
                return {"type": "http.request", "body": body, "more_body": False}  # noqa: B023
            await gone.wait()  # noqa: B023
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.set()  # noqa: B023

        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
                 "raw_path": b"/v1/chat/completions", "root_path": "", "scheme": "http", "http_version": "1.1",
                 "server": ("rksc", 80), "client": ("here", 1),
                 "headers": [(b"content-type", b"application/json")]}  # fmt: skip
        task = asyncio.ensure_future(app(scope, receive, send))
        await asyncio.sleep(after)
        gone.set()
        await asyncio.wait_for(task, 20)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            assert (await http.get("http://rksc/health")).json()["in_flight"] == 0
    reasoner.clear_cache()
    assert reasoner.kv_bytes == 0


async def test_a_key_is_asked_for(reasoner: RKSCReasoner) -> None:
    wire = transport(reasoner, api_key="correct horse battery")
    async with httpx.AsyncClient(transport=wire, base_url="http://rksc/v1") as http:
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic correct horse battery"}):
            reply = await http.post("/chat/completions", json=GOOD, headers=header)
            assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
        assert (await http.get("http://rksc/health")).status_code == 200
        http.headers["authorization"] = "Bearer correct horse battery"
        assert (await http.post("/chat/completions", json=GOOD)).status_code == 200


def test_a_public_address_without_a_key_is_refused(tmp_path: Any) -> None:
    for host in ("0.0.0.0", "::", "example.org"):
        done = CliRunner().invoke(cli, ["serve", "--host", host])
        assert (done.exit_code, "--api-key-file" in done.stderr) == (2, True)
    (tmp_path / "key").write_text("short\n")
    done = CliRunner().invoke(cli, ["serve", "--api-key-file", str(tmp_path / "key")])
    assert (done.exit_code, "16 or more" in done.stderr) == (2, True)
