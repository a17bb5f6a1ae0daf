"""The server: its endpoints, what they answer when something is wrong, and who may use them."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from rksc_agents.errors import ConfigError, EngineClosedError, KVBudgetError, PromptTooLongError, RKSCError
from rksc_agents.events import Answer, BranchToken, Event
from rksc_agents.reasoner import RKSCReasoner
from rksc_agents.result import ReasoningResult
from rksc_agents.serve.asking import Asked, UnknownModelError, asked_of
from rksc_agents.serve.body import BodyLimit
from rksc_agents.serve.limits import BusyError, Door, Limits
from rksc_agents.serve.replies import Replies, chosen
from rksc_agents.serve.requests import ChatRequest, CompletionRequest
from rksc_agents.trace import Trace

_OPEN = ("/health", "/openapi.json")  # what needs no key
_KINDS: dict[int, str] = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def make_app(
    reasoner: RKSCReasoner, *, name: str | None = None, api_key: str | None = None, limits: Limits | None = None
) -> FastAPI:
    """An OpenAI-compatible application on a reasoner.

    Parameters
    ----------
    reasoner : RKSCReasoner
        Answers; it stays yours to close. Its own strategy is used where a client names none.
    name : str or None
        The model's name for clients; None is the reasoner's.
    api_key : str or None
        What clients must send as a bearer token; None lets everybody in.
    limits : Limits or None
        What one client may take.

    Returns
    -------
    FastAPI
        With ``/v1/chat/completions``, ``/v1/completions``, ``/v1/models``, ``/v1/runs/{id}`` (the page of a run),
        ``/health`` and ``/metrics``.
    """
    return _Server(reasoner, name or reasoner.name, api_key, limits or Limits()).app


class _Server:
    def __init__(self, reasoner: RKSCReasoner, name: str, api_key: str | None, limits: Limits) -> None:
        self.reasoner = reasoner
        self.name = name
        self.limits = limits
        self.door = Door(limits.in_flight)
        self.traces: OrderedDict[str, Trace] = OrderedDict()
        self.counts: dict[str, int] = {"answered": 0, "failed": 0, "refused": 0, "prompt": 0, "reused": 0, "written": 0}
        self._key = None if api_key is None else api_key.encode()
        self.app = app = FastAPI(title="rksc-agents", docs_url=None, redoc_url=None)
        app.add_middleware(BodyLimit, most=limits.body_bytes)
        app.middleware("http")(self._let_in)
        for error, answer in (
            (RequestValidationError, _malformed),
            (HTTPException, _http),
            (BusyError, self._busy),
            (RKSCError, self._refused),
            (TimeoutError, _late),
        ):
            app.add_exception_handler(error, answer)
        app.post("/v1/chat/completions", response_model=None)(self.chat)
        app.post("/v1/completions", response_model=None)(self.complete)
        app.get("/v1/models")(self.models)
        app.get("/v1/runs/{run}", response_class=HTMLResponse)(self.run)
        app.get("/health")(self.health)
        app.get("/metrics", response_model=None)(self.metrics)

    async def _let_in(self, request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if self._key is not None and request.url.path not in _OPEN:
            kind, _, given = request.headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
                return _error(401, "a valid key is needed: send it as Authorization: Bearer KEY")
        return await go_on(request)

    # -- endpoints ------------------------------------------------------------------------------

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(body, request, chat=True, logprobs=bool(body.logprobs))

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Go on with a text as it is."""
        return await self._answer(body, request, chat=False, logprobs=body.logprobs is not None)

    async def models(self) -> dict[str, Any]:
        """The model, by the names that choose a strategy."""
        names = [self.name, *(f"{self.name}@{kind}" for kind in ("direct", "self-consistency:8", "best-of-n:8"))]
        return {"object": "list", "data": [{"id": each, "object": "model", "owned_by": "rksc"} for each in names]}

    async def run(self, run: str) -> HTMLResponse:
        """The page of a run that was answered lately."""
        if run not in self.traces:
            raise HTTPException(404, f"no run {run!r} is kept: this server keeps the last {self.limits.traces}")
        from rksc_agents.trace.page import page

        return HTMLResponse(await asyncio.to_thread(page, self.traces[run]))

    async def health(self) -> dict[str, Any]:
        """Whether it serves, how many requests are inside, and the KV held in bytes."""
        return {"status": "ok", "in_flight": self.door.inside, "kv_bytes": self.reasoner.kv_bytes}

    async def metrics(self) -> Response:
        """Figures in the text form of Prometheus."""
        lines = []
        for outcome in ("answered", "failed", "refused"):
            lines.append(f'rksc_requests_total{{outcome="{outcome}"}} {self.counts[outcome]}')
        lines += [f'rksc_tokens_total{{kind="{kind}"}} {self.counts[kind]}' for kind in ("prompt", "reused", "written")]
        lines += [f"rksc_in_flight {self.door.inside}", f"rksc_kv_bytes {self.reasoner.kv_bytes}"]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    # -- answering ------------------------------------------------------------------------------

    async def _answer(
        self, body: ChatRequest | CompletionRequest, request: Request, *, chat: bool, logprobs: bool
    ) -> Response:
        asked = asked_of(body, self.name, self.reasoner.strategy, self.limits)
        id_ = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        decode = self.reasoner.decode if logprobs else None
        replies = Replies(id_, body.model, chat=chat, asked=asked.prompt, decode=decode)
        self.door.enter()
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            pieces = self._pieces(asked, replies, usage)
            try:  # what is refused is refused with a status, before the first piece
                first = await anext(pieces)
            except BaseException:
                self.door.leave()
                raise
            return _Stream(first, pieces, self.door.leave)
        try:
            result = await self._result(asked, request)
        finally:
            self.door.leave()
        self._note(id_, result)
        return JSONResponse(replies.whole(result, asked.n))

    async def _result(self, asked: Asked, request: Request) -> ReasoningResult:
        """The result; a client that leaves frees its rows."""
        run = asyncio.ensure_future(self.reasoner.areason(asked.prompt, **asked.options))
        left = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({run, left}, timeout=self.limits.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if run.done():
                return run.result()
            raise HTTPException(499, "the client left") if left.done() else TimeoutError
        finally:
            for task in (run, left):
                task.cancel()
            await asyncio.gather(run, left, return_exceptions=True)

    async def _pieces(self, asked: Asked, replies: Replies, usage: bool) -> AsyncGenerator[dict[str, Any]]:
        result: ReasoningResult | None = None
        begun = False
        async for event in self._events(asked):
            if not begun:
                begun = True
                yield replies.begun()
            if isinstance(event, BranchToken) and asked.direct and (event.text or event.thinking):
                yield replies.grew(event.text, event.thinking)
            elif isinstance(event, Answer):
                result = event.result
        assert result is not None
        self._note(replies.id, result)
        for at, each in enumerate(chosen(result, asked.n)):
            if not asked.direct and each.text:
                yield replies.grew(each.text, each.thinking, at)
            yield replies.ended(each, at)
        if usage:
            yield replies.used(result)

    async def _events(self, asked: Asked) -> AsyncIterator[Event]:
        """What happens in a run, as long as it may take."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self.limits.timeout_s
        events = self.reasoner.astream(asked.prompt, **asked.options)
        async with aclosing(events):  # type: ignore[type-var]
            # not in one timeout block: a stream is begun in one task and goes on in another
            while (event := await asyncio.wait_for(anext(events, None), until - loop.time())) is not None:
                yield event

    def _note(self, id_: str, result: ReasoningResult) -> None:
        self.counts["answered"] += 1
        self.counts["prompt"] += result.usage.prompt_tokens_computed
        self.counts["reused"] += result.usage.prompt_tokens_reused
        self.counts["written"] += result.usage.completion_tokens
        self.traces[id_] = result.trace
        while len(self.traces) > self.limits.traces:
            self.traces.popitem(last=False)

    async def _busy(self, request: Request, error: Exception) -> Response:
        self.counts["refused"] += 1
        told = f"{self.door.most} requests are being answered: try again in a second"
        return _error(429, told, {"Retry-After": "1"})

    async def _refused(self, request: Request, error: Exception) -> Response:
        self.counts["failed"] += 1
        match error:
            case UnknownModelError():
                return _error(404, str(error))
            case EngineClosedError():
                return _error(503, "the server is shutting down", {"Retry-After": "1"})
            case ConfigError() | PromptTooLongError() | KVBudgetError():
                return _error(400, str(error))
            case _:
                return _error(500, str(error))


class _Stream(EventSourceResponse):
    """Pieces as server-sent events; whatever becomes of the client, `close` is called at the end."""

    def __init__(self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]], close: Callable[[], None]) -> None:
        super().__init__(_joined(first, rest), ping=15)
        self._rest = rest
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces."""
        try:
            await super().__call__(scope, receive, send)
        finally:  # also where the client had left before the first piece
            self._close()
            await self._rest.aclose()


async def _joined(first: dict[str, Any], rest: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, str]]:
    """All pieces as events; an error ends them with a piece that tells it."""
    try:
        yield {"data": json.dumps(first)}
        async for piece in rest:
            yield {"data": json.dumps(piece)}
        yield {"data": "[DONE]"}
    except (RKSCError, TimeoutError) as error:
        told = str(error) or "the request took too long"
        yield {"data": json.dumps({"error": {"message": told, "type": "server_error", "param": None, "code": None}})}


async def _left(request: Request) -> None:
    """Wait until the client has gone."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.2)


async def _malformed(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    return _error(400, f"{place}: {first['msg']}" if place else str(first["msg"]), param=place or None)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail), dict(error.headers or {}))


async def _late(request: Request, error: Exception) -> Response:
    return _error(504, "the request took longer than this server allows: ask for fewer tokens or branches")


def _error(status: int, message: str, headers: dict[str, str] | None = None, param: str | None = None) -> Response:
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    body = {"error": {"message": message, "type": kind, "param": param, "code": None}}
    return JSONResponse(body, status, headers)
