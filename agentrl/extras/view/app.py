"""The page and its JSON answers: read-only, behind a key in the path, for this machine's browsers only.

Every answer forbids the browser to run anything but the page's own files: no inline code, no other host. What
a model wrote reaches the page as JSON and is shown as text.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agentrl.errors import AgentRLError, UserError
from agentrl.extras.view.attempt import exact_prompt, show, whole_text
from agentrl.extras.view.attempts import Filters
from agentrl.extras.view.changes import POLL_S, state_of
from agentrl.extras.view.columns import COLUMNS
from agentrl.extras.view.compare import compare_attempts, compare_runs
from agentrl.extras.view.copying import as_script, as_test
from agentrl.extras.view.shelf import Shelf
from agentrl.extras.view.sources import ViewSource
from agentrl.loopback import is_local

TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
MAX_ROWS = 500
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the key is in the address
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Advantages = Callable[[Path, Path], Sequence[Sequence[float]]]
"""Computes the advantages of each token of each row of a step's file of a run: (run, file) -> [rows][tokens].

Raises AgentRLError if the run's algorithm needs what is not stored.
"""


class Pages:
    """Answers requests for some sources."""

    def __init__(
        self,
        sources: Sequence[ViewSource],
        *,
        tokenizer: Path | None = None,
        advantages: Advantages | None = None,
    ) -> None:
        self.shelves = [Shelf.of(source, tokenizer) for source in sources]
        self._advantages = advantages

    def answer(self, name: str, query: Mapping[str, str]) -> Any:
        """Return the answer to a question as a value for JSON.

        Raises:
            KeyError: there is no such question.
            AgentRLError: it cannot be answered; the message says why.
        """
        return {
            "sources": self._sources,
            "overview": self._overview,
            "series": self._series,
            "attempts": self._attempts,
            "histogram": self._histogram,
            "attempt": self._attempt,
            "tokens": self._tokens,
            "text": self._text,
            "prompt": self._prompt,
            "script": self._script,
            "compare": self._compare,
            "problems": self._problems,
        }[name](query)

    def shelf(self, query: Mapping[str, str]) -> Shelf:
        """Return the source of a question: `source` is its place among the arguments."""
        text = query.get("source", "0")
        if not (text.isascii() and text.isdigit() and int(text) < len(self.shelves)):
            raise UserError(f"source={text!r}: give a number from 0 to {len(self.shelves) - 1}")
        return self.shelves[int(text)]

    def _sources(self, query: Mapping[str, str]) -> Any:
        found = [
            {"title": shelf.source.title, "kind": shelf.source.kind, "is_live": shelf.source.is_live}
            for shelf in self.shelves
        ]
        return {"sources": found, "columns": COLUMNS, "can_compute": self._advantages is not None}

    def _compare(self, query: Mapping[str, str]) -> Any:
        chosen = _numbers(query, "sources", len(self.shelves))
        return compare_runs([self.shelves[number].run for number in chosen])

    def _problems(self, query: Mapping[str, str]) -> Any:
        chosen = _numbers(query, "sources", len(self.shelves))
        if len(chosen) != 2 or any(self.shelves[number].source.kind == "run" for number in chosen):
            raise UserError("problems are compared between two evaluations")
        a, b = (self.shelves[number].source.root for number in chosen)
        return compare_attempts(a, b)

    def _overview(self, query: Mapping[str, str]) -> Any:
        return self.shelf(query).run.overview()

    def _series(self, query: Mapping[str, str]) -> Any:
        names = [name for name in query.get("names", "").split(",") if name]
        return self.shelf(query).run.series(query.get("kind", "train"), names)

    def _attempts(self, query: Mapping[str, str]) -> Any:
        page = self.shelf(query).table.page(
            filters_of(query),
            sort=query.get("sort") or "newest",
            offset=_number(query, "offset", 0),
            limit=min(_number(query, "limit", 100), MAX_ROWS),
        )
        return {
            "rows": [{"key": row.key, **row.values} for row in page.rows],
            "offset": page.offset,
            "total": page.total,
            "searched": page.searched,
            "of": page.of,
            "is_complete": page.is_complete,
        }

    def _histogram(self, query: Mapping[str, str]) -> Any:
        return self.shelf(query).table.histogram(filters_of(query), query.get("column", "reward"))

    def _attempt(self, query: Mapping[str, str]) -> Any:
        return show(self.shelf(query).attempts, query.get("key", ""))

    def _tokens(self, query: Mapping[str, str]) -> Any:
        shelf, key = self.shelf(query), query.get("key", "")
        stored = shelf.attempts.read(key)
        _with_tokens(stored.trajectory, key)
        advantages = None
        if query.get("advantages"):
            advantages = self._of_file(shelf, stored.file.path)[int(key.rpartition(":")[2])]
        start, count = _number(query, "start", 0), _number(query, "count", 4000)
        return shelf.tokens(stored, start=start, count=count, advantages=advantages)

    def _of_file(self, shelf: Shelf, file: Path) -> Sequence[Sequence[float]]:
        if self._advantages is None or shelf.source.kind != "run" or file.parent.name != "trajectories":
            raise UserError("advantages are computed only for the training steps of a run")
        if file.name not in shelf.advantages:
            shelf.advantages.clear()  # one step at a time: a step may have many tokens
            shelf.advantages[file.name] = self._advantages(shelf.source.root, file)
        return shelf.advantages[file.name]

    def _text(self, query: Mapping[str, str]) -> Any:
        key = query.get("key", "")
        return whole_text(
            _with_tokens(self.shelf(query).attempts.read(key).trajectory, key),
            message=_number(query, "message", 0),
            part=query.get("part", "content"),
            call=_number(query, "call", 0),
            start=_number(query, "start", 0),
        )

    def _prompt(self, query: Mapping[str, str]) -> Any:
        shelf, key = self.shelf(query), query.get("key", "")
        return exact_prompt(_with_tokens(shelf.attempts.read(key).trajectory, key), shelf.texts())

    def _script(self, query: Mapping[str, str]) -> Any:
        key = query.get("key", "")
        own = _with_tokens(self.shelf(query).attempts.read(key).trajectory, key)
        return {"script": as_script(own), "test": as_test(own)}


def filters_of(query: Mapping[str, str]) -> Filters:
    """Return the filters of a question: its parameters `f.COLUMN`."""
    conditions = {name.removeprefix("f."): text for name, text in query.items() if name.startswith("f.")}
    return Filters.parse(conditions)


def _with_tokens(own: Any, key: str) -> Any:
    if own is None:
        raise UserError(f"attempt {key!r} was not kept, only the report of its failure")
    return own


def _number(query: Mapping[str, str], name: str, default: int) -> int:
    text = query.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise UserError(f"{name}={text!r}: give a number of at least 0")
    return int(text)


def _numbers(query: Mapping[str, str], name: str, below: int) -> list[int]:
    """Return the places of sources, such as `0,2`; all of them if none is named."""
    text = query.get(name, "")
    parts = text.split(",") if text else [str(number) for number in range(below)]
    if not all(part.isascii() and part.isdigit() and int(part) < below for part in parts):
        raise UserError(f"{name}={text!r}: give numbers from 0 to {below - 1}, such as 0,1")
    return [int(part) for part in parts]


# ------------------------------------------------------------------------------------------------------- HTTP


def to_json(value: Any) -> bytes:
    """Return the JSON of an answer; numbers that are not finite become null."""
    return orjson.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)


@cache
def asset(name: str) -> bytes | None:
    """Return a file of the page; None if there is none."""
    known = {path.name: path for path in files("agentrl.extras.view").joinpath("assets").iterdir()}
    return known[name].read_bytes() if name in known and Path(name).suffix in TYPES else None


def build_app(pages: Pages, key: str) -> ASGIApp:
    """Return the ASGI application. All its paths begin with `/KEY/`."""

    def page(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        content = asset(name)
        if content is None:
            return _problem(404, f"there is no page {name[:100]!r}")
        return Response(content, media_type=TYPES[Path(name).suffix])

    def api(request: Request) -> Response:
        try:
            found = pages.answer(request.path_params["name"], dict(request.query_params))
        except KeyError:
            return _problem(404, f"there is no question {request.path_params['name'][:100]!r}")
        except AgentRLError as error:
            return _problem(400 if isinstance(error, UserError) else 500, str(error))
        return Response(to_json(found), media_type="application/json")

    async def events(request: Request) -> Response:
        return StreamingResponse(_events(pages, request), media_type="text/event-stream")

    inner = Starlette(
        routes=[
            Route(f"/{key}/", page),
            Route(f"/{key}/api/events", events),
            Route(f"/{key}/api/{{name}}", api),
            Route(f"/{key}/{{name}}", page),
        ]
    )
    return Guard(inner, key)


def _problem(status: int, message: str) -> Response:
    return Response(to_json({"error": message}), status_code=status, media_type="application/json")


async def _events(pages: Pages, request: Request) -> AsyncIterator[bytes]:
    """Yield which sources changed in what, until the browser leaves."""
    known: list[dict[str, Any]] | None = None
    while not await request.is_disconnected():
        states = [await asyncio.to_thread(state_of, shelf.source) for shelf in pages.shelves]
        if known is None:
            yield b"event: hello\ndata: {}\n\n"
        else:
            changed = {
                str(number): [name for name in new if new[name] != old.get(name)]
                for number, (new, old) in enumerate(zip(states, known, strict=True))
            }
            if changed := {number: names for number, names in changed.items() if names}:
                yield f"event: changed\ndata: {json.dumps(changed)}\n\n".encode()
            else:
                yield b": nothing\n\n"
        known = states
        await asyncio.sleep(POLL_S)


class Guard:
    """ASGI middleware: refuses everything but GETs of this machine's browser that know the key.

    A page of another origin cannot read an answer (no CORS) and is refused; a name that was made to resolve
    to 127.0.0.1 is no local Host.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._prefix = f"/{key}/".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *own]}
            await send(message)

        refused = self._refusal(scope)
        await (self._app if refused is None else refused)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if not is_local(_host(headers.get("host", ""))):
            return _problem(403, "the Host is not this machine; use 127.0.0.1 or localhost")
        if scope["method"] not in ("GET", "HEAD"):
            return _problem(405, "this page only reads")
        path = str(scope["path"]).encode()
        if not hmac.compare_digest(path[: len(self._prefix)], self._prefix):
            return _problem(403, "the key in the address is wrong; use the address that the command printed")
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
        if site not in ("none", "same-origin") and mode != "navigate":
            return _problem(403, "requests of other pages are refused")
        return None


def _host(header: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]
