"""Sends the answer to one streamed request while its turn is sampled."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from agentrl.extras.gateway.http_server import Begin, HttpResponse, Send
from agentrl.extras.gateway.turns import Asked, Listener, RequestError, TurnReply, TurnRequest, Writer
from agentrl.types import ToolCall

WAITING_S = 10.0
"""Seconds of silence after which the program is sent an event without content.

Programs give up on a server that says nothing for minutes, and ask again.
"""

Event = Callable[[], bytes]
"""Writes an event, when it is sent: a writer numbers its events."""
Complete = Callable[[TurnRequest, Listener | None], Awaitable[TurnReply]]
Refuse = Callable[[RequestError], HttpResponse]


class _Pieces:
    """Passes on what is told, as events. The events of one turn fit into memory, so nobody waits."""

    def __init__(self, writer: Writer, sender: trio.MemorySendChannel[Event]) -> None:
        self._writer = writer
        self._sender = sender

    def reasoning(self, text: str) -> None:
        self._sender.send_nowait(partial(self._writer.reasoning, text))

    def text(self, text: str) -> None:
        self._sender.send_nowait(partial(self._writer.text, text))

    def call(self, call: ToolCall) -> None:
        self._sender.send_nowait(partial(self._writer.call, call))


class _Stream:
    """The events to a program. The head of the response is sent with the first one, so that a request that
    fails at once is answered with the status of its error.
    """

    def __init__(self, writer: Writer, begin: Begin) -> None:
        self._writer = writer
        self._begin = begin
        self._send: Send | None = None

    @property
    def has_begun(self) -> bool:
        return self._send is not None

    async def send(self, event: Event) -> None:
        if self._send is None:
            self._send = await self._begin("text/event-stream")
            await self._send(self._writer.begin())
        await self._send(event())


async def stream_reply(complete: Complete, asked: Asked, refuse: Refuse, begin: Begin) -> HttpResponse | None:
    """Sample a turn and send it as events. Returns the refusal of a request that fails before the first."""
    stream = _Stream(asked.writer, begin)
    sender, receiver = trio.open_memory_channel[Event](float("inf"))
    outcome: list[TurnReply | RequestError] = []

    async def sample() -> None:
        with sender:
            try:
                outcome.append(await complete(asked.request, _Pieces(asked.writer, sender)))
            except RequestError as error:
                outcome.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sample)
        try:
            await _pass_on(receiver, stream, asked.writer)
        except (trio.BrokenResourceError, trio.ClosedResourceError):  # the client disconnected
            nursery.cancel_scope.cancel()
    if not outcome:
        return None
    if isinstance(outcome[0], TurnReply):
        await stream.send(partial(asked.writer.end, outcome[0]))
    elif not stream.has_begun:
        return refuse(outcome[0])
    else:
        await stream.send(partial(asked.writer.fail, outcome[0]))
    return None


async def _pass_on(receiver: trio.MemoryReceiveChannel[Event], stream: _Stream, writer: Writer) -> None:
    """Send events until their channel is closed, and signs of life while none comes."""
    while True:
        event: Event = writer.waiting
        with trio.move_on_after(WAITING_S):
            try:
                event = await receiver.receive()
            except trio.EndOfChannel:
                return
        await stream.send(event)
