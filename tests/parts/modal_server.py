"""A server with Modal's protocol, on the loopback address, for Modal's own client.

One address answers for the cloud and for the workers on which sandboxes run. Both speak gRPC, by the code
that Modal generates from its own protocol.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from grpclib import GRPCError, Status
from grpclib.server import Server
from modal_proto import api_pb2, task_command_router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from parts.cloud_machine import Machine

TOKEN = {"MODAL_TOKEN_ID": "ak-0123456789", "MODAL_TOKEN_SECRET": "as-9876543210"}
IMAGE_ID = "im-0123456789"
"""Of every image that the registry has: those whose names begin with python, as that of Modal's own."""
PAGE = 2
"""Sandboxes of one answer to a list."""
CHUNK = 2**20
FILE_TOOL = "/__modal/.bin/modal-sandbox-fs-tools"
"""Modal's program in each sandbox, by which the client reads and writes files."""

Ended = api_pb2.GenericResult


@dataclass
class Command:
    """A command in a sandbox. result: exit code, output, errors. file, stdin: for Modal's file program."""

    result: asyncio.Future[tuple[int, bytes, bytes]]
    file: dict[str, Any] = field(default_factory=dict)
    stdin: bytearray = field(default_factory=bytearray)


class Cloud:
    """All sandboxes.

    refusals: with which the next requests for a sandbox are answered. busy: those of the next commands.
    num_late: of the next questions how a sandbox ended, those that are answered as if it ran.
    num_lost_answers: of the next requests for a sandbox, those that are done but not answered. ends: how
    sandboxes ended that are no more. beats: sandboxes that got a sign of life. creating, building: a sandbox
    or an image is asked for; it is made when `may_create` or `may_build` is set.
    """

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.ends: dict[str, Any] = {}
        self.refusals: list[GRPCError] = []
        self.busy: list[GRPCError] = []
        self.beats: list[str] = []
        self.apps: list[str] = []
        self.num_made = 0
        self.num_lost_answers = 0
        self.num_late = 0
        self.creating, self.building = threading.Event(), threading.Event()
        self.may_create, self.may_build = threading.Event(), threading.Event()
        self.may_create.set()
        self.may_build.set()
        self.url = ""

    def end(self, name: str, status: Any, exit_code: int = 0) -> None:
        """End a sandbox, as Modal tells it."""
        machine = self.machines.pop(name)
        self.ends[name] = Ended(status=status, exitcode=exit_code)
        machine.end()

    def end_idle(self) -> None:
        """End the sandboxes that got no command for too long."""
        for name, machine in list(self.machines.items()):
            if (
                time.monotonic() - machine.asked["used"]
                > machine.asked["request"].definition.idle_timeout_secs
            ):
                self.end(name, Ended.GENERIC_STATUS_IDLE_TIMEOUT)

    def close(self) -> None:
        for machine in self.machines.values():
            machine.end()


class Answering:
    """A service whose methods are those of a subclass that begin with `on_`: a request -> its answers."""

    def __getattr__(self, name: str) -> Any:
        async def answered(stream: Any) -> None:
            self.check(stream.metadata)
            if (answers := getattr(type(self), f"on_{name}", None)) is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"the tests' server has no {name}")
            if name == "TaskExecStdinWriteStream":
                await stream.send_message(await answers(self, stream))
                return
            async for answer in answers(self, await stream.recv_message()):
                await stream.send_message(answer)

        return answered


class Control(Answering):
    """Modal's control plane."""

    __mapping__ = ModalClientBase.__mapping__

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def check(self, metadata: Any) -> None:
        told = {
            f"MODAL_{name}": metadata.get(f"x-modal-{name.lower().replace('_', '-')}")
            for name in ("TOKEN_ID", "TOKEN_SECRET")
        }
        if told != TOKEN:
            raise GRPCError(Status.UNAUTHENTICATED, "the token is not known")

    async def on_AuthTokenGet(self, request: Any) -> AsyncIterator[Any]:
        yield api_pb2.AuthTokenGetResponse(token=web_token())

    async def on_EnvironmentGetOrCreate(self, request: Any) -> AsyncIterator[Any]:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        yield api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    async def on_AppGetOrCreate(self, request: Any) -> AsyncIterator[Any]:
        if request.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            self.cloud.apps.append(request.app_name)
        if request.app_name not in self.cloud.apps:
            raise GRPCError(Status.NOT_FOUND, f"App {request.app_name} not found")
        yield api_pb2.AppGetOrCreateResponse(app_id=f"ap-{request.app_name}")

    async def on_ImageGetOrCreate(self, request: Any) -> AsyncIterator[Any]:
        self.cloud.building.set()
        await asyncio.to_thread(self.cloud.may_build.wait, 30)
        if request.image.dockerfile_commands[0].startswith("FROM python:"):
            result = Ended(status=Ended.GENERIC_STATUS_SUCCESS)
        else:
            result = Ended(status=Ended.GENERIC_STATUS_FAILURE, exception="manifest unknown")
        yield api_pb2.ImageGetOrCreateResponse(image_id=IMAGE_ID, result=result)

    async def on_ImageFromId(self, request: Any) -> AsyncIterator[Any]:
        if request.image_id != IMAGE_ID:
            raise GRPCError(Status.NOT_FOUND, f"Image {request.image_id} not found")
        yield api_pb2.ImageFromIdResponse(image_id=request.image_id)

    async def on_SandboxCreateV2(self, request: Any) -> AsyncIterator[Any]:
        if self.cloud.refusals:
            raise self.cloud.refusals.pop(0)
        if request.definition.name in [machine.asked["name"] for machine in self.cloud.machines.values()]:
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox {request.definition.name} already exists")
        self.cloud.creating.set()
        await asyncio.to_thread(self.cloud.may_create.wait, 30)
        name = f"sb-{uuid.uuid4().hex}"
        self.cloud.machines[name] = Machine(
            {"request": request, "name": request.definition.name, "at": time.time(), "used": time.monotonic()}
        )
        self.cloud.num_made += 1
        if self.cloud.num_lost_answers:
            self.cloud.num_lost_answers -= 1
            raise GRPCError(Status.UNAVAILABLE, "the answer is lost")
        access = api_pb2.CommandRouterAccess(url=self.cloud.url, jwt=web_token())
        yield api_pb2.SandboxCreateV2Response(
            sandbox_id=name, task_id=f"ta-{name}-V", command_router_access=access
        )

    async def on_SandboxGetFromNameV2(self, request: Any) -> AsyncIterator[Any]:
        for name, machine in self.cloud.machines.items():
            if machine.asked["name"] == request.sandbox_name:
                yield api_pb2.SandboxGetFromNameResponse(sandbox_id=name)
                return
        raise GRPCError(Status.NOT_FOUND, f"Sandbox {request.sandbox_name} not found")

    async def on_SandboxGetFromName(self, request: Any) -> AsyncIterator[Any]:
        raise GRPCError(Status.NOT_FOUND, "there are no sandboxes of the first version")
        yield

    async def on_SandboxWaitV2(self, request: Any) -> AsyncIterator[Any]:
        if request.sandbox_id not in self.cloud.machines:
            self._known(request.sandbox_id)
        is_late = self.cloud.num_late > 0
        self.cloud.num_late -= is_late
        result = None if is_late else self.cloud.ends.get(request.sandbox_id)
        yield api_pb2.SandboxWaitResponse(result=result)

    async def on_SandboxTerminateV2(self, request: Any) -> AsyncIterator[Any]:
        if request.sandbox_id in self.cloud.machines:
            self.cloud.end(request.sandbox_id, Ended.GENERIC_STATUS_TERMINATED)
        self._known(request.sandbox_id)
        yield api_pb2.SandboxTerminateResponse()

    async def on_SandboxListV2(self, request: Any) -> AsyncIterator[Any]:
        wanted = {(tag.tag_name, tag.tag_value) for tag in request.tags}
        found = [
            (machine.asked["at"], name)
            for name, machine in self.cloud.machines.items()
            if machine.asked["request"].app_id == request.app_id
            and wanted <= {(tag.tag_name, tag.tag_value) for tag in machine.asked["request"].tags}
            and machine.asked["at"] < (request.before_timestamp or float("inf"))
        ]
        newest = sorted(found, reverse=True)[:PAGE]
        infos = [api_pb2.SandboxInfo(id=name, created_at=at) for at, name in newest]
        yield api_pb2.SandboxListResponse(sandboxes=infos)

    async def on_SandboxTagsGetV2(self, request: Any) -> AsyncIterator[Any]:
        asked = self.cloud.machines[request.sandbox_id].asked["request"]
        yield api_pb2.SandboxTagsGetResponse(tags=asked.tags)

    async def on_SandboxGetCommandRouterAccess(self, request: Any) -> AsyncIterator[Any]:
        yield api_pb2.SandboxGetCommandRouterAccessResponse(url=self.cloud.url, jwt=web_token())

    def _known(self, name: str) -> None:
        if name not in self.cloud.ends:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {name} not found")


class Router(Answering):
    """The worker's service: commands in sandboxes."""

    __mapping__ = TaskCommandRouterBase.__mapping__

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.commands: dict[str, Command] = {}
        self.tasks: set[asyncio.Task[None]] = set()

    def check(self, metadata: Any) -> None:
        if not metadata.get("authorization", "").startswith("Bearer "):
            raise GRPCError(Status.UNAUTHENTICATED, "no token")

    async def on_TaskExecStart(self, request: Any) -> AsyncIterator[Any]:
        if self.cloud.busy:
            raise self.cloud.busy.pop(0)
        name = request.task_id.removeprefix("ta-").removesuffix("-V")
        if name not in self.cloud.machines:
            raise GRPCError(Status.NOT_FOUND, f"task {request.task_id} not found")
        self.cloud.machines[name].asked["used"] = time.monotonic()
        command = self.commands[request.exec_id] = Command(asyncio.get_running_loop().create_future())
        match list(request.command_args):
            case [tool, told] if tool == FILE_TOOL:
                command.file = json.loads(told)
                if "ReadFile" in command.file:
                    command.result.set_result(_file(command.file["ReadFile"]["path"]))
            case arguments:
                if arguments == ["true"]:
                    self.cloud.beats.append(name)
                task = asyncio.create_task(self._play(command, name, arguments, request.timeout_secs))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
        yield task_command_router_pb2.TaskExecStartResponse()

    async def _play(self, command: Command, name: str, arguments: list[str], timeout_s: float) -> None:
        process = self.cloud.machines[name].start(arguments, {})
        try:
            told, errors = await asyncio.to_thread(process.communicate, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            told = errors = b""
            await asyncio.to_thread(process.wait)
        if name in self.cloud.machines:
            command.result.set_result((process.returncode, told, errors))
        else:
            command.result.set_exception(GRPCError(Status.NOT_FOUND, "the task has ended"))

    async def on_TaskExecStdinWriteStream(self, stream: Any) -> Any:
        command = None
        async for message in stream:
            match message.WhichOneof("payload"):
                case "start":
                    command = self.commands[message.start.exec_id]
                case "data":
                    command.stdin += message.data
                case "end":
                    with open(command.file["WriteFile"]["path"], "wb") as file:
                        file.write(command.stdin)
                    command.result.set_result((0, b"", b""))
        return task_command_router_pb2.TaskExecStdinWriteStreamResponse()

    async def on_TaskExecStdioRead(self, request: Any) -> AsyncIterator[Any]:
        _, told, errors = await asyncio.shield(self.commands[request.exec_id].result)
        if request.file_descriptor == task_command_router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR:
            told = errors
        for begin in range(request.offset, len(told), CHUNK):
            yield task_command_router_pb2.TaskExecStdioReadResponse(data=told[begin : begin + CHUNK])

    async def on_TaskExecWait(self, request: Any) -> AsyncIterator[Any]:
        code, _, _ = await asyncio.shield(self.commands[request.exec_id].result)
        told = {"code": code} if code >= 0 else {"signal": -code}
        yield task_command_router_pb2.TaskExecWaitResponse(**told)


def _file(path: str) -> tuple[int, bytes, bytes]:
    try:
        with open(path, "rb") as file:
            return 0, file.read(), b""
    except OSError as error:
        return 1, b"", json.dumps({"error_kind": "NotFound", "message": str(error)}).encode()


def web_token() -> str:
    """Return a JSON web token that nobody signed."""
    parts = ({"alg": "none"}, {"exp": time.time() + 3600})
    texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*texts, "unsigned"])


@contextmanager
def modal_server() -> Iterator[tuple[str, Cloud]]:
    """Yield the URL of a server, and its cloud."""
    from modal._utils.grpc_utils import custom_detail_codec

    cloud = Cloud()
    listening = socket.create_server(("127.0.0.1", 0))
    cloud.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    loop, ends = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = Server([Control(cloud), Router(cloud)], status_details_codec=custom_detail_codec)
        await server.start(sock=listening)
        await ends.wait()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        yield cloud.url, cloud
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(10)
        cloud.close()
