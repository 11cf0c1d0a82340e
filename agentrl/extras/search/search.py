"""A search tool on a local corpus: BM25 over a Parquet file with the columns `id`, `title` and `text`.

Source of the ranking: Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework: BM25 and Beyond",
in Lucene's variant (library bm25s).
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import bm25s
import pyarrow as pa
import pyarrow.parquet as pq
import Stemmer
from pydantic import Field

from agentrl.errors import ConfigError, DataError
from agentrl.plugins import Tool, ToolResult
from agentrl.plugins.call_threads import CallThreads
from agentrl.plugins.options import Options, read_options
from agentrl.types import JsonObject

COLUMNS = ("id", "title", "text")
MAX_QUERY_CHARS = 1000
LEAD_CHARS = 60
"""Characters of text before the first match that a snippet shows."""
MAX_THREADS = 16
"""Concurrent searches of a process."""
ELLIPSIS = "…"
WORD = re.compile(r"\w+")
ALL_WORDS = r"(?u)\b\w+\b"

Language = Literal["english", "none"]


class SearchOptions(Options):
    """Options in `agent.tool_config.search`."""

    corpus: str = Field(description="Parquet file with the columns id, title, text.")
    top_k: int = Field(3, ge=1, le=50, description="Number of results per call.")
    max_snippet_chars: int = Field(400, ge=40, description="Maximum characters of a document in a result.")
    language: Language = Field(
        "english", description="english: stop words are dropped and words stemmed; none: words as they are."
    )


class Search(Tool):
    """Returns the documents that match the query best. The index is built once per process and file."""

    name: ClassVar[str] = "search"
    description: ClassVar[str] = (
        "Search a collection of documents. Returns the titles and passages that fit the query best."
    )
    parameters: ClassVar[JsonObject] = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "Words to look for."}},
        "required": ["query"],
    }
    runtime = "trio"
    is_idempotent = True
    _threads: ClassVar[CallThreads] = CallThreads("tool 'search'", num=MAX_THREADS)

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(SearchOptions, self.config, plugin="tool 'search'")
        path = Path(self._options.corpus)
        if not path.is_file():
            raise ConfigError(
                f"tool 'search': corpus={self._options.corpus!r} is not a file; it must be Parquet with "
                f"{', '.join(COLUMNS)}"
            )

    async def call(self, arguments: JsonObject) -> ToolResult:
        query = arguments["query"][:MAX_QUERY_CHARS]
        results = await self._threads.run(self._search, query)
        if not results:
            return ToolResult("no document matches; try other words", metrics={"num_results": 0.0})
        shown = (
            f"{rank}. {found.title} [{found.id}]\n{found.snippet}"
            for rank, found in enumerate(results, start=1)
        )
        return ToolResult("\n\n".join(shown), metrics={"num_results": float(len(results))})

    def _search(self, query: str) -> list[Found]:
        options = self._options
        index = open_index(options.corpus, options.language)
        return index.search(query, top_k=options.top_k, max_chars=options.max_snippet_chars)


@dataclass(frozen=True, slots=True)
class Found:
    """One document, with the part of its text that contains most words of the query."""

    id: str
    title: str
    snippet: str
    score: float


class Index:
    """A BM25 index over title and text. It is read-only once built, so any number of threads can search."""

    def __init__(self, documents: pa.Table, language: Language) -> None:
        self._documents = documents
        self._language = language
        texts = [
            f"{title}\n{text}"
            for title, text in zip(self._strings("title"), self._strings("text"), strict=True)
        ]
        self._words = bm25s.tokenize(texts, **self._options(), return_ids=True, show_progress=False)
        self._bm25 = bm25s.BM25(method="lucene")
        self._bm25.index(self._words, show_progress=False)
        self._vocabulary = self._words.vocab

    def search(self, query: str, *, top_k: int, max_chars: int) -> list[Found]:
        """Return at most `top_k` documents that contain a word of the query, best first."""
        (stems,) = bm25s.tokenize([query], **self._options(), return_ids=False, show_progress=False)
        if not any(stem in self._vocabulary for stem in stems):
            return []
        positions, scores = self._bm25.retrieve(
            [stems], k=min(top_k, self._documents.num_rows), show_progress=False
        )
        return [
            self._found(int(at), query, float(score), max_chars)
            for at, score in zip(positions[0], scores[0], strict=True)
            if score > 0
        ]

    def _found(self, at: int, query: str, score: float, max_chars: int) -> Found:
        id, title, text = (str(self._documents[name][at].as_py() or "") for name in COLUMNS)
        return Found(
            id, " ".join(title.split()), snippet(text, WORD.findall(query.lower()), max_chars), score
        )

    def _strings(self, column: str) -> list[str]:
        return [value or "" for value in self._documents[column].to_pylist()]

    def _options(self) -> dict[str, Any]:
        if self._language == "none":
            return {"stopwords": None, "stemmer": None, "token_pattern": ALL_WORDS}
        # A new stemmer for each use: stemmers have state, and threads search concurrently.
        return {"stopwords": "en", "stemmer": Stemmer.Stemmer("english"), "token_pattern": ALL_WORDS}


_building = threading.Lock()


def open_index(corpus: str, language: Language) -> Index:
    """Return the index of a file. It is built at its first use, and again if the file has changed.

    Raises:
        DataError: the file is not Parquet, lacks a column, or is empty.
    """
    with _building:  # the first calls of many attempts are concurrent: one builds the index, the others wait
        return _index(corpus, Path(corpus).stat().st_mtime_ns, language)


@functools.lru_cache(maxsize=4)
def _index(corpus: str, modified_ns: int, language: Language) -> Index:
    try:
        names = pq.read_schema(corpus).names
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"tool 'search': {corpus} cannot be read as Parquet: {error}") from error
    if missing := [column for column in COLUMNS if column not in names]:
        raise DataError(
            f"tool 'search': {corpus} has no column {', '.join(missing)}; it has {', '.join(names)}"
        )
    documents = pq.read_table(corpus, columns=list(COLUMNS))
    if documents.num_rows == 0:
        raise DataError(f"tool 'search': {corpus} has no rows")
    return Index(documents, language)


def snippet(text: str, words: Sequence[str], max_chars: int) -> str:
    """Return at most `max_chars` characters of `text` on one line: the part that contains most matches of
    `words`.
    """
    text = " ".join(text.split())
    if len(text) <= max_chars:
        return text
    # Equal beginnings approximate the index's stems.
    stems = tuple({word[:5] for word in words if len(word) > 2})
    lowered = text.lower()
    starts = (
        [found.start() for found in WORD.finditer(lowered) if lowered.startswith(stems, found.start())]
        if stems
        else []
    )
    room = max_chars - 2 * len(ELLIPSIS)
    best = max(
        starts,
        key=lambda start: sum(start <= other < start + room - LEAD_CHARS for other in starts),
        default=0,
    )
    first = max(0, min(best - LEAD_CHARS, len(text) - room))
    first = text.find(" ", first, best) + 1 or first if first else 0
    last = min(len(text), first + room)
    if last < len(text):
        last = max(text.rfind(" ", first, last), first) if text.rfind(" ", first, last) > first else last
    return (ELLIPSIS if first else "") + text[first:last] + (ELLIPSIS if last < len(text) else "")
