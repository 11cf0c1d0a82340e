"""Servers and rollout actors as the run last saw them: `control/servers.json`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import CheckpointError
from agentrl.tracking.seals import read_document


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server as the run last saw it."""

    name: str
    kind: str
    state: str
    restarts: int
    outstanding_tokens: int
    message: str


@dataclass(frozen=True, slots=True)
class ActorState:
    """A rollout actor as the run last saw it. in_flight, finished: its attempts."""

    name: str
    state: str
    restarts: int
    in_flight: int
    finished: int


@dataclass(frozen=True, slots=True)
class FleetState:
    """time: when it was seen, in seconds since the epoch; None: never, or the file is damaged."""

    servers: tuple[ServerState, ...] = ()
    actors: tuple[ActorState, ...] = ()
    time: float | None = None


def read_fleet(run: Path) -> FleetState:
    """Return the state of a run's servers and actors; a run of an earlier version has no actors there.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = run / "control" / "servers.json"
    if not file.exists():
        return FleetState()
    table = read_document(file)
    try:
        return FleetState(
            tuple(_server(one) for one in table["servers"]),
            tuple(_actor(one) for one in table.get("actors", ())),
            float(table["time"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r}") from error


def _server(one: dict[str, Any]) -> ServerState:
    return ServerState(
        name=str(one.get("url") or one["name"]),
        kind=f"{one['kind']} ({one['origin']})",
        state=str(one["state"]),
        restarts=int(one["restarts"]),
        outstanding_tokens=int(one["outstanding_tokens"]),
        message=str(one.get("message") or ""),
    )


def _actor(one: dict[str, Any]) -> ActorState:
    return ActorState(
        name=str(one["name"]),
        state=str(one["state"]),
        restarts=int(one["restarts"]),
        in_flight=int(one["in_flight"]),
        finished=int(one["finished"]),
    )
