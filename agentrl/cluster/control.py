"""Control of a live run from another shell, by files in the run folder.

```
control/requests/ID.json  {"verb": "attach" | "start" | "drain", "server": URL or name}; removed by the driver
control/answers/ID.json   {"is_done": true | false, "message": one line}; removed by the asker
control/servers.json      the run's servers and rollout actors, as the driver last saw them
```

The driver reads requests between buffer polls. All files are JSON and validated when read. Access control is
the permissions of the run folder; no port is open.
"""

from __future__ import annotations

import datetime
import fcntl
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.cluster.servers import ServerLine
from agentrl.data.atomic_files import write_atomically
from agentrl.errors import CheckpointError, ConfigError, InfrastructureError, UserError
from agentrl.tracking.seals import read_document, sealed_document

POLL_S = 0.2
SHOW_INTERVAL_S = 5.0
"""servers.json is written on every change of state; changes in token counts alone are written this often."""

_HEADS = ("server", "kind", "state", "version", "outstanding tokens", "restarts")


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ControlRequest(_Message):
    """A request to a run. `server`: the URL to attach to, or the URL or name of the server to drain."""

    verb: Literal["attach", "start", "drain"]
    server: str = ""


class Answer(_Message):
    """The result of a request."""

    is_done: bool
    message: str


@dataclass(frozen=True, slots=True)
class ShownServer(ServerLine):
    """A server in servers.json.

    outstanding_tokens: of the requests in flight, their prompt and the tokens that they may still sample.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    outstanding_tokens: int


@dataclass(frozen=True, slots=True)
class ActorLine:
    """A rollout actor as its last report shows it, for display.

    state: starting, playing, or silent: it did not answer when it was last asked. restarts: how often its
    place was taken by another. in_flight, finished: attempts of this incarnation.
    """

    name: str
    state: str
    restarts: int
    in_flight: int
    finished: int


class ServerTable(_Message):
    """The content of servers.json. version: of the ready servers. time: seconds since the epoch."""

    time: float
    version: int
    servers: tuple[ShownServer, ...]
    actors: tuple[ActorLine, ...]


M = TypeVar("M", bound=_Message)


class ControlDesk:
    """The driver's side: answers requests and writes servers.json."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "control"
        self._requests = self._folder / "requests"
        self._answers = self._folder / "answers"
        self._shown: tuple[object, float] = (None, 0.0)
        for folder in (self._requests, self._answers):
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("*.json"):  # left by an earlier run that ended before it read them
                old.unlink()

    def serve(self, act: Callable[[ControlRequest], str]) -> None:
        """Answer all pending requests with the text that `act` returns, or with its UserError."""
        for file in sorted(self._requests.glob("*.json")):
            text = file.read_text()
            try:
                # before acting: a request that crashes the run must not crash the next run, too
                file.unlink()
            except OSError:  # the disk is read-only: the request would be repeated on every poll
                return
            answer = self._answer(text, act)
            with suppress(InfrastructureError):  # the disk is full: the asker times out
                write_atomically(self._answers / file.name, answer.model_dump_json())

    @staticmethod
    def _answer(text: str, act: Callable[[ControlRequest], str]) -> Answer:
        try:
            return Answer(is_done=True, message=act(ControlRequest.model_validate_json(text)))
        except ValidationError as error:
            return Answer(is_done=False, message=f"invalid request: {error.errors()[0]['msg']}")
        except UserError as error:
            return Answer(is_done=False, message=str(error))

    def show(
        self,
        lines: Sequence[ServerLine],
        *,
        version: int,
        outstanding_tokens: Callable[[], Mapping[str, int]],
        actors: Sequence[ActorLine],
    ) -> None:
        """Write the table if a server or actor has changed, or if SHOW_INTERVAL_S has passed."""
        changing = tuple((actor.name, actor.state, actor.restarts) for actor in actors)
        state, now = (tuple(lines), version, changing), time.monotonic()
        if state == self._shown[0] and now - self._shown[1] < SHOW_INTERVAL_S:
            return
        self._shown = (state, now)
        tokens = outstanding_tokens()
        servers = tuple(
            ShownServer(**asdict(line), outstanding_tokens=tokens.get(line.url, 0)) for line in lines
        )
        table = ServerTable(time=time.time(), version=version, servers=servers, actors=tuple(actors))
        # the disk is full: readers see by its `time` that the table is stale
        with suppress(InfrastructureError):
            write_atomically(self._folder / "servers.json", sealed_document(table.model_dump(mode="json")))


def ask(run_dir: Path, request: ControlRequest, *, timeout_s: float) -> str:
    """Ask the run in `run_dir` and return its answer.

    Raises:
        ConfigError: no run is active there, the run ended meanwhile, or it refuses the request.
        InfrastructureError: the run did not answer in time (the request is withdrawn), or the answer is
            unreadable.
    """
    refuse_idle(run_dir)
    name = f"{time.time_ns()}-{uuid.uuid4().hex}.json"
    asked, answered = run_dir / "control" / "requests" / name, run_dir / "control" / "answers" / name
    write_atomically(asked, request.model_dump_json())
    deadline = time.monotonic() + timeout_s
    while not answered.exists():
        if time.monotonic() > deadline:
            asked.unlink(missing_ok=True)
            raise InfrastructureError(
                f"the run did not answer within {timeout_s:g} s (a run answers between steps and while it "
                "waits for a batch)"
            )
        refuse_idle(run_dir)
        time.sleep(POLL_S)
    answer = _read(answered, Answer)
    answered.unlink()
    if not answer.is_done:
        raise ConfigError(answer.message)
    return answer.message


def read_servers(run_dir: Path) -> ServerTable:
    """Return the servers of the run in `run_dir`.

    Raises ConfigError if it is not active, or still starting.
    """
    refuse_idle(run_dir)
    file = run_dir / "control" / "servers.json"
    if not file.exists():
        raise ConfigError(f"the run in {str(run_dir)!r} is still starting")
    return _read(file, ServerTable)


def format_servers(table: ServerTable) -> str:
    """Return a header, a line per server, the servers' messages if any, and the time of the table."""
    rows = [_HEADS, *(_cells(server, table.version) for server in table.servers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    notes = [
        f"{server.url or server.name}: {server.message.splitlines()[0]}"
        for server in table.servers
        if server.message
    ]
    seen = datetime.datetime.fromtimestamp(table.time).astimezone()
    return "\n".join([*lines, *notes, f"as last seen by the run at {seen:%Y-%m-%d %H:%M:%S}"])


def _cells(server: ShownServer, version: int) -> tuple[str, ...]:
    return (
        server.url or server.name,
        f"{server.kind} ({server.origin})",
        server.state,
        _version(server, version),
        str(server.outstanding_tokens),
        str(server.restarts),
    )


def _version(server: ShownServer, version: int) -> str:
    if server.origin not in ("started", "attached"):
        return "frozen"
    return str(version) if server.state == "ready" else "-"


def refuse_idle(run_dir: Path) -> None:
    """Raise ConfigError if no run is active in `run_dir`. An active run holds the lock of its folder."""
    lock = run_dir / ".lock"
    if not lock.exists():
        raise ConfigError(f"{str(run_dir)!r} is not the folder of a run")
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return
    raise ConfigError(f"no run is active in {str(run_dir)!r}")


def _read(file: Path, kind: type[M]) -> M:
    try:
        return kind.model_validate(read_document(file))
    except CheckpointError as error:
        raise InfrastructureError(str(error)) from error
    except ValidationError as error:
        raise InfrastructureError(f"{file} cannot be read: {str(error).splitlines()[0]}") from error
