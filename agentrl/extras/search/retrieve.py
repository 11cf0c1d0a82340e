"""A search tool on a retrieval server, by Search-R1's protocol.

POST /retrieve {"queries": ["..."], "topk": 3, "return_scores": true} is answered with {"result": [[...]]}: a
list per query, of {"document": {"contents": "title\\ntext"}, "score": 1.5}, or of documents without scores.

Source: Jin et al. 2025 (Search-R1), arXiv:2503.09516.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field

from agentrl.errors import ConfigError, ServerError, ToolError
from agentrl.http.client import HttpClient
from agentrl.plugins import Tool, ToolResult
from agentrl.plugins.options import Options, read_options, secret
from agentrl.types import JsonObject

MAX_QUERY_CHARS = 1000
MAX_REPLY_BYTES = 8 * 2**20


class RetrieveOptions(Options):
    """Options in `agent.tool_config.retrieve`."""

    url: str = Field(description="Of the retrieval server, with its path: http://127.0.0.1:8000/retrieve.")
    top_k: int = Field(3, ge=1, le=50, description="Number of documents per call.")
    max_document_chars: int = Field(2000, ge=40, description="Maximum characters of a document in a result.")
    api_key_env: str | None = Field(
        None, description="Environment variable with the bearer token; None: the server needs none."
    )


class Retrieve(Tool):
    """Returns the documents that a retrieval server ranks first, as Search-R1 shows them."""

    name: ClassVar[str] = "retrieve"
    description: ClassVar[str] = "Search for documents. Returns the passages that fit the query best."
    parameters: ClassVar[JsonObject] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to search for."}},
        "required": ["query"],
    }
    runtime = "trio"
    is_idempotent = True

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        options = read_options(RetrieveOptions, self.config, plugin="tool 'retrieve'")
        key = secret(options.api_key_env, plugin="tool 'retrieve'")
        try:
            parts = urlsplit(options.url)
            self._http = HttpClient(
                f"{parts.scheme}://{parts.netloc}",
                headers={} if key is None else {"Authorization": f"Bearer {key}"},
                max_reply_bytes=MAX_REPLY_BYTES,
            )
        except ValueError as error:
            raise ConfigError(f"tool 'retrieve': url: {error}") from error
        self._path = (parts.path or "/retrieve") + (f"?{parts.query}" if parts.query else "")
        self._options = options

    async def call(self, arguments: JsonObject) -> ToolResult:
        """Ask the server.

        Raises:
            ToolError: it is not there, refuses, or answers with something else.
        """
        body = {
            "queries": [arguments["query"][:MAX_QUERY_CHARS]],
            "topk": self._options.top_k,
            "return_scores": True,
        }
        try:
            reply = await self._http.request("POST", self._path, json=body)
            if reply.status != 200:
                raise ToolError(f"{reply.origin}{self._path} answered with status {reply.status}")
            documents = _documents(reply.json())
        except ServerError as error:
            raise ToolError(str(error)) from error
        shown = [
            _shown(number, text[: self._options.max_document_chars])
            for number, text in enumerate(documents[: self._options.top_k], start=1)
        ]
        text = "\n".join(shown) if shown else "no document matches; try other words"
        return ToolResult(text, metrics={"num_results": float(len(shown))})

    async def close(self) -> None:
        await self._http.aclose()


def _documents(reply: Any) -> list[str]:
    """Return the contents of the first query's documents, best first.

    Raises:
        ToolError: the reply has another form.
    """
    results = reply.get("result") if isinstance(reply, Mapping) else None
    if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], list):
        raise ToolError('the retrieval server must answer {"result": [[...]]} with a list for each query')
    return [_contents(found) for found in results[0]]


def _contents(found: Any) -> str:
    document = found.get("document", found) if isinstance(found, Mapping) else None
    if isinstance(document, Mapping):
        if isinstance(contents := document.get("contents"), str):
            return contents
        if isinstance(text := document.get("text"), str):
            return f"{document.get('title') or ''}\n{text}"
    raise ToolError("a document of the retrieval server needs `contents`, or `title` and `text`")


def _shown(number: int, contents: str) -> str:
    title, _, text = contents.partition("\n")
    title = title.strip().strip('"')
    return f"Doc {number}(Title: {title}) {' '.join(text.split())}"
