"""Data sets of the hub by name: from its cache, or from a small hub on this machine; never the network."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

READ = """
import json, sys
from agentrl.data.originals import OriginalSource, open_originals, read_originals
from agentrl.errors import DataError

def read(source):
    try:
        return [[row.split, row.index, row.raw["n"]] for row in read_originals(open_originals(OriginalSource(**source)))]
    except DataError as error:
        return str(error)

print(json.dumps([read(source) for source in json.loads(sys.argv[1])]))
"""  # noqa: E501


def read(environment: dict, *sources: dict) -> list:
    """The environment of huggingface_hub is read at its import: a process of its own."""
    clean = {
        "PATH": "/usr/bin:/bin",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": ":".join(sys.path),
    }
    command = [sys.executable, "-c", READ, json.dumps(sources)]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def parquet(*numbers: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"n": list(numbers)}), buffer)
    return buffer.getvalue()


CONVERTED, MAIN, OLD = "c" * 40, "a" * 40, "b" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a snapshot of a data set needs; `asked` are the files that were
    fetched.
    """

    asked: ClassVar[list[str]] = []
    revisions: ClassVar[dict[str, dict[str, str]]] = {
        "team/sums": {"refs/convert/parquet": CONVERTED, "main": MAIN, "v1": OLD},
        "team/plain": {"main": MAIN},
    }
    files: ClassVar[dict[str, dict[str, bytes]]] = {
        CONVERTED: {
            "main/train/0000.parquet": parquet(1, 2),
            "main/test/0000.parquet": parquet(3),
            "other/train/0000.parquet": parquet(4),
        },
        MAIN: {"train.jsonl": b'{"n": 5}\n', "README.md": b"words", "load.py": b"raise SystemExit"},
        OLD: {"train.jsonl": b'{"n": 6}\n'},
    }

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        for name, revisions in self.revisions.items():
            for kind in ("revision", "tree"):
                start = f"/api/datasets/{name}/{kind}/"
                if path.startswith(start):
                    revision = path.removeprefix(start).removesuffix("/")
                    commit = revisions.get(revision, revision if revision in revisions.values() else None)
                    return self.describe(name, kind, commit)
            start = f"/datasets/{name}/resolve/"
            if path.startswith(start):
                commit, _, file = path.removeprefix(start).partition("/")
                if self.command == "GET":
                    self.asked.append(file)
                return self.answer(
                    200, self.files[commit][file], {"ETag": f'"{commit}{file}"', "X-Repo-Commit": commit}
                )
        return self.answer(
            404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"}
        )

    do_HEAD = do_GET

    def describe(self, name: str, kind: str, commit: str | None) -> None:
        if commit is None:
            return self.answer(
                404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no such revision"}
            )
        files = self.files[commit]
        tree = [
            {"type": "file", "path": file, "size": len(content), "oid": file}
            for file, content in files.items()
        ]
        info = {"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]}
        return self.answer(
            200, json.dumps(tree if kind == "tree" else info).encode(), {"Content-Type": "application/json"}
        )

    def answer(self, status: int, body: bytes, headers: dict) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def hub(tmp_path):
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": str(tmp_path / "cache")}
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_hubs_own_parquet_files_are_read_and_only_those_of_the_subset(hub):
    assert read(hub, {"name": "team/sums", "subset": "main"}) == [
        [["test", 0, 3], ["train", 0, 1], ["train", 1, 2]]
    ]
    assert sorted(Hub.asked) == ["main/test/0000.parquet", "main/train/0000.parquet"]
    offline = {**hub, "HF_HUB_OFFLINE": "1"}
    assert read(offline, {"name": "team/sums", "subset": "main", "split": "test"}) == [[["test", 0, 3]]]


def test_the_authors_files_are_read_where_there_are_no_others_or_a_revision_is_named(hub):
    assert read(hub, {"name": "team/plain"}, {"name": "team/sums", "revision": "v1"}) == [
        [["train", 0, 5]],
        [["train", 0, 6]],
    ]
    assert sorted(Hub.asked) == ["train.jsonl", "train.jsonl"]


def test_what_the_hub_does_not_have_is_told_apart(hub):
    sums = {"name": "team/sums"}
    said = read(
        hub,
        {"name": "team/other"},
        {**sums, "subset": "none"},
        {**sums, "revision": "v2"},
        {**sums, "split": "dev"},
    )
    assert "no such dataset on the hub" in said[0]
    assert said[1] == "'team/sums' has no subset (folder) 'none'"
    assert said[2] == "dataset 'team/sums': the hub does not have revision 'v2'"
    assert said[3] == "'team/sums' has no split 'dev'; it has test, train"


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_no_network_is_one_clear_line(tmp_path, environment):
    said = read({"HF_HUB_CACHE": str(tmp_path), **environment}, {"name": "team/sums"})[0]
    assert said.startswith("dataset 'team/sums': no such folder, and the hub cannot be reached")
    assert "\n" not in said
