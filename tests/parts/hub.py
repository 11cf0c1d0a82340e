"""A hub on this machine, and programs that ask it; never the network."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote


@dataclass(frozen=True)
class Repository:
    """A repository of the hub: the commits of its revisions, and the files of each commit."""

    revisions: Mapping[str, str]
    files: Mapping[str, Mapping[str, bytes]]

    def commit(self, revision: str) -> str | None:
        """Return the commit of a revision, which may be a commit itself; None if there is no such one."""
        return self.revisions.get(revision, revision if revision in self.files else None)


@dataclass
class Hub:
    """A running hub: the environment of a program that uses it, and the files that were fetched."""

    environment: Mapping[str, str]
    asked: list[str] = field(default_factory=list)


@contextmanager
def hub_with(repositories: Mapping[str, Repository], folder: Path) -> Iterator[Hub]:
    """Serve `repositories` by name, data sets as `datasets/NAME`; programs cache below `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.repositories = repositories
    endpoint = f"http://127.0.0.1:{server.server_port}"
    server.hub = Hub({"HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(folder / "cache")})
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Answers(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a snapshot of a repository needs."""

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0]).strip("/")
        for name, repository in self.server.repositories.items():
            described = name if name.startswith("datasets/") else f"models/{name}"
            for kind in ("revision", "tree"):
                if path.startswith(start := f"api/{described}/{kind}/"):
                    return self.describe(name, kind, repository, path.removeprefix(start))
            if path.startswith(start := f"{name}/resolve/"):
                commit, _, file = path.removeprefix(start).partition("/")
                if self.command == "GET":
                    self.server.hub.asked.append(file)
                headers = {"ETag": f'"{commit}{file}"', "X-Repo-Commit": commit}
                return self.answer(200, repository.files[commit][file], headers)
        return self.refuse("RepoNotFound", "no such repository")

    do_HEAD = do_GET

    def describe(self, name: str, kind: str, repository: Repository, revision: str) -> None:
        commit = repository.commit(revision)
        if commit is None:
            return self.refuse("RevisionNotFound", "no such revision")
        files = repository.files[commit]
        tree = [
            {"type": "file", "path": file, "size": len(content), "oid": file}
            for file, content in files.items()
        ]
        info = {"id": name.removeprefix("datasets/"), "sha": commit}
        info["siblings"] = [{"rfilename": file} for file in files]
        body = json.dumps(tree if kind == "tree" else info).encode()
        return self.answer(200, body, {"Content-Type": "application/json"})

    def refuse(self, code: str, message: str) -> None:
        self.answer(404, b"{}", {"X-Error-Code": code, "X-Error-Message": message})

    def answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


def ask_in_process(program: str, environment: Mapping[str, str], *arguments: str) -> Any:
    """Run a program in an environment without ours; return the JSON of its last line.

    huggingface_hub reads its environment when it is imported: only a process of its own sees another one.
    """
    clean = {
        "PATH": "/usr/bin:/bin",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
