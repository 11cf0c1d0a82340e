"""Search: the ranking is BM25, snippets keep their budget, and a corpus is indexed once."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError, DataError
from agentrl.extras.search.search import Index, Search, open_index, snippet
from agentrl.plugins import ToolResult
from agentrl.testing import call, play

TEXTS = [
    "the cat sat on the mat",
    "dogs and cats",
    "a cat, a cat, a cat!",
    "nothing to see",
    "Größe zählt 42",
]


def table(texts=TEXTS) -> pa.Table:
    return pa.table(
        {
            "id": [str(i) for i in range(len(texts))],
            "title": [f"T{i}" for i in range(len(texts))],
            "text": list(texts),
        }
    )


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    pq.write_table(table(), tmp_path / "corpus.parquet")
    return str(tmp_path / "corpus.parquet")


def search(config: dict, query: str) -> ToolResult:
    return trio.run(Search(config).call, {"query": query})


def bm25(query: list[str], documents: list[list[str]], *, k1: float = 1.5, b: float = 0.75) -> list[float]:
    """The formula itself, by hand: Lucene's variant, without the constant factor k1 + 1."""
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in query:
            containing = sum(word in other for other in documents)
            idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            frequency = document.count(word)
            score += idf * frequency / (frequency + k1 * (1 - b + b * len(document) / mean))
        scores.append(score)
    return scores


@pytest.mark.parametrize("query", ["cat", "cat mat", "dogs", "see nothing cat"])
def test_the_ranking_is_bm25(query) -> None:
    documents = [
        f"t{i} {text.replace(',', '').replace('!', '')}".lower().split() for i, text in enumerate(TEXTS)
    ]
    expected = bm25(query.split(), documents)
    found = Index(table(), "none").search(query, top_k=5, max_chars=100)
    assert {one.id: pytest.approx(one.score, rel=1e-4) for one in found} == {
        str(i): s for i, s in enumerate(expected) if s > 0
    }
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)


def test_words_are_stemmed_in_english_only() -> None:
    assert {one.id for one in Index(table(), "english").search("cats", top_k=5, max_chars=100)} == {
        "0",
        "1",
        "2",
    }
    assert {one.id for one in Index(table(), "none").search("cats", top_k=5, max_chars=100)} == {"1"}


def test_other_alphabets_and_digits_are_words() -> None:
    index = Index(table(), "none")
    assert [one.id for one in index.search("GRÖSSE größe", top_k=5, max_chars=100)] == ["4"]
    assert [one.id for one in index.search("42", top_k=5, max_chars=100)] == ["4"]


def test_results_are_numbered_and_limited(corpus) -> None:
    result = search({"corpus": corpus, "top_k": 2}, "cat")
    assert result.text.startswith("1. T2 [2]\na cat, a cat, a cat!\n\n2. T")
    assert result.text.count("\n\n") == 1
    assert result.metrics == {"num_results": 2.0}


@pytest.mark.parametrize("query", ["zebra", "", "the", "?!", "\x00"])
def test_no_match_says_so(corpus, query) -> None:
    assert search({"corpus": corpus}, query).text == "no document matches; try other words"


@given(st.text(max_size=2000), st.text(max_size=50), st.integers(40, 300))
def test_a_snippet_keeps_its_budget_and_is_of_the_text(text, query, max_chars) -> None:
    short = snippet(text, query.lower().split(), max_chars)
    assert len(short) <= max_chars
    assert short.strip("…").strip() in " ".join(text.split()) or "…" in text


def test_a_snippet_shows_where_most_words_are() -> None:
    text = "lion " + "filler words " * 100 + "the lion and the lamb lie down " + "more filler " * 100
    short = snippet(text, ["lion", "lamb"], 80)
    assert "lion and the lamb" in short
    assert short.startswith("…")
    assert short.endswith("…")


def test_a_file_is_indexed_once_until_it_changes(corpus) -> None:
    first = open_index(corpus, "english")
    assert open_index(corpus, "english") is first
    pq.write_table(table(["zebra"]), corpus)
    os.utime(corpus, ns=(1, 1))
    assert open_index(corpus, "english") is not first
    assert "zebra" in search({"corpus": corpus}, "zebra").text


def test_wrong_corpora(tmp_path) -> None:
    with pytest.raises(ConfigError, match="tool 'search': corpus: Field required"):
        Search({})
    with pytest.raises(ConfigError, match="is not a file"):
        Search({"corpus": str(tmp_path / "absent.parquet")})
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        search({"corpus": str(tmp_path / "text.parquet")}, "x")
    pq.write_table(pa.table({"id": ["1"], "body": ["x"]}), tmp_path / "columns.parquet")
    with pytest.raises(DataError, match="has no column title, text; it has id, body"):
        search({"corpus": str(tmp_path / "columns.parquet")}, "x")
    pq.write_table(table([]), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="has no rows"):
        search({"corpus": str(tmp_path / "empty.parquet")}, "x")


def test_the_model_searches(corpus) -> None:
    trajectory = play(
        [call("search", query="dogs"), "done"], tools=["search"], tool_config={"search": {"corpus": corpus}}
    )
    assert trajectory.messages[2].content == "1. T1 [1]\ndogs and cats"
    assert trajectory.metrics["search/num_results"] == 1.0
