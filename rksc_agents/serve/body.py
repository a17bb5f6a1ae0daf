"""No body is larger than allowed, whatever its headers say."""

from __future__ import annotations

import json

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """Answers a request whose body is too large with 413, without reading the rest of it.

    Parameters
    ----------
    app : ASGIApp
        What answers the others.
    most : int
        Bytes of a body at most.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self.most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, its body read."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client has left
                return
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self.most:
                await self._refuse(send)
                return
        body: Message | None = {"type": "http.request", "body": b"".join(parts), "more_body": False}

        async def read() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            message, body = body, None
            return message

        await self.app(scope, read, send)

    async def _refuse(self, send: Send) -> None:
        told = f"the body is larger than {self.most:,} bytes, which is the limit of this server"
        error = {"message": told, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})
