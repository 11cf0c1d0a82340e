"""Servers and rollout actors as the run last saw them: `control/servers.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    """Return the state of a run's servers and actors; a run of an earlier version has no actors there."""
    try:
        table = json.loads((run / "control" / "servers.json").read_text())
        return FleetState(
            tuple(_server(one) for one in table["servers"]),
            tuple(_actor(one) for one in table.get("actors", ())),
            float(table["time"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return FleetState()


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
