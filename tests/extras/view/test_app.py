"""The page over HTTP: who is let in, what a browser may do, and answers as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from agentrl.extras.view.app import HEADERS, Pages, asset, build_app
from agentrl.extras.view.sources import open_sources
from parts.viewed import write_run

KEY = "thekey"
ASSETS = [
    "index.html",
    "style.css",
    "icon.svg",
    "app.js",
    "api.js",
    "dom.js",
    "charts.js",
    "run.js",
    "attempts.js",
    "attempt.js",
    "compare.js",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path)
    return tmp_path


@pytest.fixture
def client(folder: Path) -> TestClient:
    return TestClient(build_app(Pages(open_sources([folder])), KEY), base_url="http://127.0.0.1:1")


def get(client: TestClient, question: str, **parameters: Any) -> Any:
    reply = client.get(f"/{KEY}/api/{question}", params=parameters)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    "path", ["/", "/thekeY/", "/thekey", "/thekey2/", "//thekey/", "/api/sources", "/%74hekex/"]
)
def test_without_the_key_nothing_is_answered(client: TestClient, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 403
    assert "the key in the address is wrong" in reply.json()["error"]


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": ""},
        {"host": "evil.example:127.0.0.1"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
    ],
)
def test_pages_of_others_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    assert client.get(f"/{KEY}/api/sources", headers=headers).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:9", "localhost:9", "[::1]:9", "localhost"])
def test_this_machine_is_let_in_by_any_of_its_names(client: TestClient, host: str) -> None:
    assert client.get(f"/{KEY}/", headers={"host": host, "sec-fetch-site": "same-origin"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_it_only_reads(client: TestClient, method: str) -> None:
    assert client.request(method, f"/{KEY}/api/sources").status_code == 405


def test_every_answer_forbids_to_run_anything_else(client: TestClient) -> None:
    for path in (f"/{KEY}/", f"/{KEY}/app.js", f"/{KEY}/api/sources", f"/{KEY}/api/nothing", "/wrong"):
        headers = client.get(path).headers
        assert {name: headers[name] for name in HEADERS} == HEADERS
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize("name", ASSETS)
def test_files_of_the_page_are_its_own(client: TestClient, name: str) -> None:
    """Nothing inline, nothing of another host, and no way to turn a text into HTML or code."""
    text = client.get(f"/{KEY}/{name}").text
    assert text.encode() == asset(name)
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    for danger in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "DOMParser",
        "srcdoc",
        "javascript:",
    ):
        assert danger not in text
    if name == "index.html":
        assert re.findall(r"<script(?![^>]*\bsrc=)", text) == []
        assert re.findall(r"\son\w+=|\sstyle=", text) == []


@pytest.mark.parametrize("path", ["..%2f..%2fapp.py", "app.py", "%2e%2e", "assets", ".", "app.js%00"])
def test_no_other_file_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/{KEY}/{path}").status_code in (403, 404)


def test_the_assets_are_all_of_those_that_are_there() -> None:
    import agentrl.extras.view

    there = {path.name for path in (Path(agentrl.extras.view.__file__).parent / "assets").iterdir()}
    assert there == set(ASSETS)


def test_questions_are_answered_as_json(client: TestClient) -> None:
    sources = get(client, "sources")
    assert [source["kind"] for source in sources["sources"]] == ["run"]
    query = {"f.set": "training", "sort": "-reward", "limit": 2, "offset": 1}
    while not (page := get(client, "attempts", **query))["is_complete"]:
        pass  # a busy machine needs more than one answer
    assert (len(page["rows"]), page["offset"], page["total"]) == (2, 1, 18)
    key = page["rows"][0]["key"]
    assert get(client, "attempt", key=key)["key"] == key
    tokens = get(client, "tokens", key=key)
    assert len(tokens["ids"]) == tokens["total"] == len(tokens["mask"])
    assert get(client, "script", key=key)["script"].startswith("# t:")
    assert get(client, "histogram", column="outcome")["labels"]
    assert get(client, "series", names="rollout/reward_mean")["steps"] == [1, 2, 3]
    assert get(client, "overview")["step"] == 3


@pytest.mark.parametrize(
    ("question", "parameters", "status", "complaint"),
    [
        ("nothing", {}, 404, "there is no question 'nothing'"),
        ("attempts", {"f.reward": "x"}, 400, "reward='x' is no number"),
        ("attempts", {"offset": "-1"}, 400, "offset='-1': give a number of at least 0"),
        ("attempts", {"source": "7"}, 400, "source='7': give a number from 0 to 0"),
        ("attempt", {"key": "x:0"}, 400, "there is no attempt 'x:0'"),
        ("tokens", {"key": "failures.parquet:0"}, 400, "was not kept, only the report of its failure"),
        (
            "tokens",
            {"key": "trajectories/step_000001.parquet:0", "advantages": "1"},
            400,
            "advantages are computed only",
        ),
        ("histogram", {"column": "text"}, 400, "'text' has no histogram"),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(
    client: TestClient, question, parameters, status, complaint
) -> None:
    reply = client.get(f"/{KEY}/api/{question}", params=parameters)
    assert reply.status_code == status
    assert complaint in reply.json()["error"]


def test_what_a_model_wrote_is_data(folder: Path, client: TestClient) -> None:
    """Answers are JSON and never HTML, whatever is in them."""
    reply = client.get(f"/{KEY}/api/attempts", params={"f.text": "<script>"})
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-content-type-options"] == "nosniff"
    for row in json.loads(reply.text)["rows"]:
        assert (
            "application/json"
            in client.get(f"/{KEY}/api/attempt", params={"key": row["key"]}).headers["content-type"]
        )
