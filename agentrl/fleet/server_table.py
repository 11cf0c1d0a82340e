"""Formats the servers of a run as a text table."""

from __future__ import annotations

import datetime

from agentrl.fleet.control import ServerTable, ShownServer

_HEADS = ("server", "kind", "state", "version", "outstanding tokens", "restarts")


def format_servers(table: ServerTable) -> str:
    """Return a header, a line per server, the servers' messages if any, and the time of the table."""
    rows = [_HEADS, *(_cells(server, table.version) for server in table.servers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"{server.url or server.name}: {server.message.splitlines()[0]}" for server in table.servers if server.message]
    seen = datetime.datetime.fromtimestamp(table.time).astimezone()
    return "\n".join([*lines, *notes, f"as the run saw it at {seen:%Y-%m-%d %H:%M:%S}"])


def _cells(server: ShownServer, version: int) -> tuple[str, ...]:
    return (
        server.url or server.name,
        f"{server.kind} ({server.origin})",
        server.state,
        str(version) if server.state == "ready" else "-",
        str(server.outstanding_tokens),
        str(server.restarts),
    )
