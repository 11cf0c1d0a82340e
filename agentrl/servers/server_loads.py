"""The load that servers report, to diagnose a run without progress."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import trio

from agentrl.errors import ServerError
from agentrl.servers.client import SGLangClient
from agentrl.servers.trio_run import in_trio
from agentrl.tracking.watchdog import SLICE_S


def ask_loads(
    clients: Sequence[SGLangClient], *, answer_s: float, stopping: threading.Event
) -> dict[str, str]:
    """Return one line per server about its load, or that it does not answer: URL -> line. Closes the clients.

    All servers are asked concurrently. Call it from a thread without trio. It returns after at most
    `answer_s` seconds, or soon after `stopping` is set.
    """
    lines = {client.url: f"does not answer within {answer_s:g} s" for client in clients}
    in_trio(_ask_all, clients, lines, answer_s, stopping)
    return lines


async def _ask_all(
    clients: Sequence[SGLangClient], lines: dict[str, str], answer_s: float, stopping: threading.Event
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_when, stopping, nursery.cancel_scope)
        async with trio.open_nursery() as asking:
            for client in clients:
                asking.start_soon(_ask_one, client, lines, answer_s)
        nursery.cancel_scope.cancel()


async def _ask_one(client: SGLangClient, lines: dict[str, str], answer_s: float) -> None:
    try:
        with trio.move_on_after(answer_s):
            load = await client.loads()
            used = f"{load.num_used_tokens} of {load.max_tokens} tokens"
            lines[client.url] = f"{load.num_running} running, {load.num_waiting} waiting, {used}"
    except ServerError as error:
        lines[client.url] = f"fails: {error}"
    finally:
        await client.aclose()


async def _cancel_when(stopping: threading.Event, scope: trio.CancelScope) -> None:
    while not stopping.is_set():
        await trio.sleep(SLICE_S)
    scope.cancel()
