"""A server with Daytona's protocol, on the loopback address, for Daytona's own client.

One address answers for the cloud, below /api, and for the programs inside of its sandboxes, below /toolbox.
"""

from __future__ import annotations

import json
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from werkzeug import Request, Response
from werkzeug.serving import make_server

from parts.cloud_machine import Machine

KEY = "dtn_0123456789"
SNAPSHOTS = ("daytona-small", "other")
PAGE = 2
"""Sandboxes of one answer to a list."""


class Cloud:
    """All sandboxes.

    refusals: statuses with which the next requests for a sandbox are answered. busy: those of the next
    commands. states: of sandboxes that are not started; those that are creating have started when one looks.
    """

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.refusals: list[int] = []
        self.busy: list[int] = []
        self.states: dict[str, str] = {}
        self.first_state = "creating"
        self.url = ""

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        return self._answer(Request(environ))(environ, start_response)

    def _answer(self, request: Request) -> Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return _error(401, "the key is not known")
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["api", "sandbox"]:
                return self._create(json.loads(request.get_data()))
            case "GET", ["api", "sandbox"]:
                begin = int(request.args.get("cursor") or 0)
                names = list(self.machines)
                more = str(begin + PAGE) if begin + PAGE < len(names) else None
                shown = [self._told(name) for name in names[begin : begin + PAGE]]
                return _json(200, {"items": shown, "nextCursor": more})
            case method, ["api", "sandbox", asked]:
                found = [name for name, one in self.machines.items() if asked in (name, one.asked["name"])]
                if not found:
                    return _error(404, f"Sandbox with ID or name {asked} not found")
                told = self._told(found[0])
                if method == "GET":
                    self.states.pop(found[0], None) if told["state"] == "creating" else None
                    return _json(200, told)
                if method == "DELETE":
                    self.machines.pop(found[0]).end()
                    return _json(200, {**told, "state": "destroyed"})
            case "POST", ["toolbox", name, *path]:
                machine = self.machines.get(name)
                if machine is None:
                    return _error(404, f"Sandbox {name} not found")
                if self.states.get(name, "started") != "started":
                    return _error(400, "the sandbox is not started")
                match path:
                    case ["process", "execute"]:
                        return self._execute(machine, json.loads(request.get_data()))
                    case ["files", "bulk-upload"]:
                        return _upload(machine, request)
                    case ["files", "bulk-download"]:
                        return _download(machine, json.loads(request.get_data()))
        return _error(404, f"{request.method} {request.path}")

    def _create(self, asked: dict[str, Any]) -> Response:
        if self.refusals:
            return _error(self.refusals.pop(0), "not now")
        if asked.get("snapshot", SNAPSHOTS[0]) not in SNAPSHOTS:
            return _error(400, f"Snapshot {asked['snapshot']} not found")
        name = str(uuid.uuid4())
        self.machines[name] = Machine(asked)
        self.states[name] = self.first_state
        return _json(200, self._told(name))

    def _told(self, name: str) -> dict[str, Any]:
        asked = self.machines[name].asked
        return {
            "id": name,
            "organizationId": "tests",
            "name": asked["name"],
            "user": "daytona",
            "env": asked["env"],
            "labels": asked["labels"],
            "public": False,
            "networkBlockAll": asked["networkBlockAll"],
            "kvm": False,
            "target": "us",
            "cpu": 1,
            "gpu": 0,
            "memory": 1,
            "disk": 3,
            "state": self.states.get(name, "started"),
            "toolboxProxyUrl": f"{self.url}/toolbox",
        }

    def _execute(self, machine: Machine, asked: dict[str, Any]) -> Response:
        if self.busy:
            return _error(self.busy.pop(0), "not now")
        process = machine.start(["sh", "-c", asked["command"]], asked.get("envs") or {})
        try:
            stdout, stderr = process.communicate(timeout=asked["timeout"])
        except subprocess.TimeoutExpired:
            process.kill()
            return _error(408, "command execution timeout", code="PROCESS_EXECUTION_TIMEOUT")
        if process.returncode == -9 and machine.token not in [one.token for one in self.machines.values()]:
            return _error(502, "the sandbox does not answer")
        return _json(200, {"exitCode": process.returncode, "result": (stdout + stderr).decode()})

    def close(self) -> None:
        for machine in self.machines.values():
            machine.end()


def _upload(machine: Machine, request: Request) -> Response:
    path = machine.home / request.form["files[0].path"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(request.files["files[0].file"].read())
    return Response(status=200)


def _download(machine: Machine, asked: dict[str, Any]) -> Response:
    """Return the one file that was asked for, as a part of a form."""
    (name,) = asked["paths"]
    path = machine.home / name
    if path.is_file():
        kind, content = "file", path.read_bytes()
    else:
        kind, content = "error", _error(404, "file not found").get_data()
    head = (
        f'--part\r\nContent-Disposition: form-data; name="{kind}"; filename="{name}"\r\n'
        f"Content-Type: application/{'octet-stream' if kind == 'file' else 'json'}\r\n\r\n"
    )
    body = head.encode() + content + b"\r\n--part--\r\n"
    return Response(body, content_type="multipart/form-data; boundary=part")


def _json(status: int, found: Any) -> Response:
    return Response(json.dumps(found), status, content_type="application/json")


def _error(status: int, message: str, *, code: str | None = None) -> Response:
    found = {"statusCode": status, "message": message, "source": "DAYTONA_DAEMON", "code": code}
    return Response(json.dumps(found), status, {"Retry-After": "0"}, content_type="application/json")


@contextmanager
def daytona_server() -> Iterator[tuple[str, Cloud]]:
    """Yield the URL of a server, and its cloud."""
    cloud = Cloud()
    server = make_server("127.0.0.1", 0, cloud, threaded=True)
    cloud.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"{cloud.url}/api", cloud
    finally:
        server.shutdown()
        thread.join()
        cloud.close()
