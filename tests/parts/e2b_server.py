"""A server with E2B's protocol, on the loopback address, for E2B's own client.

One address answers for the cloud and for all of its machines: the client names the machine in a header. A
machine is a folder, in which the tests' own programs run without walls.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from connectrpc.code import Code
from connectrpc.errors import ConnectError
from werkzeug import Request, Response
from werkzeug.serving import make_server

from parts.cloud_machine import Machine

KEY = "e2b_0123456789"
TEMPLATES = ("base", "other")


class Cloud:
    """All machines.

    refusals: statuses with which the next requests for a machine are answered. creating: a machine is asked
    for; it is made when `may_create` is set. states: of machines that do not answer, as the cloud tells them.
    """

    def __init__(self) -> None:
        from e2b.envd.process.process_connect import ProcessWSGIApplication

        self.num_made = 0
        self.creating = threading.Event()
        self.may_create = threading.Event()
        self.may_create.set()
        self.machines: dict[str, Machine] = {}
        self.refusals: list[int] = []
        self.states: dict[str, str] = {}
        self.keys: set[str] = set()
        self._commands = ProcessWSGIApplication(_Commands(self))

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        request = Request(environ)
        if request.path.startswith("/process.Process/"):
            machine = self.machine_of(request)
            if machine is None:
                return _gone(environ, start_response)
            return self._commands(environ, start_response)
        return self._answer(request)(environ, start_response)

    def machine_of(self, request: Request) -> Machine | None:
        name = request.headers.get("E2b-Sandbox-Id", "")
        machine = None if name in self.states else self.machines.get(name)
        is_known = machine is not None and request.headers.get("X-Access-Token") == machine.token
        return machine if is_known else None

    def _answer(self, request: Request) -> Response:
        match request.method, request.path.strip("/").split("/"):
            case _, ["health"] | ["files"]:
                machine = self.machine_of(request)
                if machine is None:
                    return Response(_GONE, 502, content_type="application/json")
                return Response(status=204) if request.path == "/health" else _file(machine, request)
            case _ if request.headers.get("X-API-Key") != KEY:
                return _error(401, "the key is not known")
            case "POST", ["v2", "sandboxes"]:
                return self._create(json.loads(request.get_data()))
            case "GET", ["v2", "sandboxes"]:
                return _json(200, [_listed(name, machine) for name, machine in self.machines.items()])
            case "GET", ["sandboxes", name] if name in self.machines:
                state = self.states.get(name, "running")
                return _json(200, {**_listed(name, self.machines[name]), "state": state})
            case "GET", ["sandboxes", name]:
                return _error(404, f"sandbox {name} not found")
            case "DELETE", ["sandboxes", name]:
                machine = self.machines.pop(name, None)
                if machine is None:
                    return _error(404, f"sandbox {name} not found")
                machine.end()
                return Response(status=204)
        return _error(405, f"{request.method} {request.path}")

    def _create(self, asked: dict[str, Any]) -> Response:
        if self.refusals:
            status = self.refusals.pop(0)
            return Response(
                json.dumps({"code": status, "message": "not now"}),
                status,
                {"Retry-After": "0"},
                content_type="application/json",
            )
        if asked["templateID"] not in TEMPLATES:
            return _error(404, f"template '{asked['templateID']}' not found")
        self.creating.set()
        self.may_create.wait(30)
        name = uuid.uuid4().hex[:20]
        machine = self.machines[name] = Machine(asked)
        self.num_made += 1
        return _json(
            201,
            {
                "templateID": asked["templateID"],
                "sandboxID": name,
                "clientID": "test",
                "envdVersion": "0.6.2",
                "envdAccessToken": machine.token,
            },
        )

    def close(self) -> None:
        for machine in self.machines.values():
            machine.end()


class _Commands:
    """envd's service of processes, by the code that E2B generates from its own protocol."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud

    def __getattr__(self, name: str) -> Any:
        def refused(*_: Any) -> Any:
            raise ConnectError(Code.UNIMPLEMENTED, f"the tests' server has no {name}")

        return refused

    def start(self, request: Any, context: Any) -> Iterator[Any]:
        from e2b.envd.process.process_pb import ProcessEvent, StartResponse
        from protobuf import Oneof

        machine = self._cloud.machines[context.request_headers["e2b-sandbox-id"]]
        process = machine.start([request.process.cmd, *request.process.args], dict(request.process.envs))

        def told(kind: str, event: Any) -> Any:
            return StartResponse(event=ProcessEvent(event=Oneof(kind, event)))

        yield told("start", ProcessEvent.StartEvent(pid=process.pid))
        stdout, stderr = process.communicate()
        for kind, text in (("stdout", stdout), ("stderr", stderr)):
            if text:
                yield told("data", ProcessEvent.DataEvent(output=Oneof(kind, text)))
        code = process.returncode
        ended = ProcessEvent.EndEvent(exit_code=code, exited=code >= 0, status=f"exit status {code}")
        yield told("end", ended)


_GONE = json.dumps({"code": 502, "message": "The sandbox was not found"})


def _gone(environ: dict[str, Any], start_response: Any) -> Any:
    return Response(
        json.dumps({"code": "unavailable", "message": "The sandbox was not found"}),
        503,
        content_type="application/json",
    )(environ, start_response)


def _file(machine: Machine, request: Request) -> Response:
    path = machine.home / request.args["path"]
    if request.method == "GET":
        if not path.is_file():
            return _error(404, f"file '{path}' not found")
        return Response(path.read_bytes(), content_type="application/octet-stream")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(request.get_data())
    return _json(200, [{"path": str(path), "name": path.name, "type": "file"}])


def _listed(name: str, machine: Machine) -> dict[str, Any]:
    return {
        "templateID": machine.asked["templateID"],
        "sandboxID": name,
        "clientID": "test",
        "startedAt": "2026-01-01T00:00:00Z",
        "endAt": "2026-01-01T01:00:00Z",
        "cpuCount": 1,
        "memoryMB": 512,
        "diskSizeMB": 512,
        "state": "running",
        "envdVersion": "0.6.2",
        "metadata": machine.asked["metadata"],
    }


def _json(status: int, found: Any) -> Response:
    return Response(json.dumps(found), status, content_type="application/json")


def _error(status: int, message: str) -> Response:
    return _json(status, {"code": status, "message": message})


@contextmanager
def e2b_server() -> Iterator[tuple[str, Cloud]]:
    """Yield the URL of a server, and its cloud."""
    cloud = Cloud()
    server = make_server("127.0.0.1", 0, cloud, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", cloud
    finally:
        server.shutdown()
        thread.join()
        cloud.close()
