"""Access control of the embedded server, by the head of a request alone."""

from __future__ import annotations

import hmac
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.extras.gateway.admission import refusal_of

_OPEN_PATHS = frozenset({"/health", "/ready"})


class AdmissionMiddleware:
    """ASGI middleware: refuses requests from web pages (403, 415) or without the key (401) unread."""

    def __init__(self, app: ASGIApp, api_key: str | None, *, is_on_loopback: bool) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode() if api_key else None
        self._is_on_loopback = is_on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := self._refused(scope)) is not None:
            await refused(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refused(self, scope: Scope) -> Response | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        refusal = refusal_of(texts, is_on_loopback=self._is_on_loopback)
        if refusal is not None:
            return json_response(
                {"error": {"message": refusal.message, "type": "Refused", "code": refusal.status}},
                status=refusal.status,
            )
        if self._expected is None or scope["path"] in _OPEN_PATHS:
            return None
        is_right = hmac.compare_digest(headers.get(b"authorization", b""), self._expected)
        return None if is_right else json_response({"error": "Unauthorized"}, status=401)


def json_response(content: Any, *, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
