"""A scripted model: samples the turns of a script, in the tokens and the tool-call format of a real chat
template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio

from agentrl.chat.chat import Chat
from agentrl.chat.parsing import call_id
from agentrl.errors import RequestRefused
from agentrl.servers.protocol import Pulse, ServerLoad
from agentrl.servers.streamed import StreamedTokens
from agentrl.types import Generation, Message, SamplingParams, ToolCall

STREAMED_TOKENS = 4
"""Tokens that a streamed turn tells at a time."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a scripted turn."""

    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True)
class Says:
    """One scripted turn: text, then calls.

    `reasoning` comes before both if the template supports thinking.
    """

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Raw:
    """The exact text of one scripted turn, for malformed calls and incomplete markup."""

    text: str


ScriptedTurn = str | Call | Says | Raw | Sequence[Call]
"""A text, a call, several calls at once, a combination of text and calls (`Says`), or an exact text (`Raw`).
"""

Script = Sequence[ScriptedTurn] | Callable[[int, str], ScriptedTurn]
"""The turns in order, or a function of the turn's index (from 0) and the prompt as text."""


def call(name: str, /, **arguments: object) -> Call:
    """Return a tool call for a script: `call("calculator", expression="6*7")`."""
    return Call(name, arguments)


class ScriptedModel:
    """Replaces a server's client. Each attempt plays the script from its beginning.

    A turn beyond the end of the script is refused, and the attempt fails with a message that says so.

    Args:
        version: policy version that the sampled tokens carry.
        latency_s: how long each turn takes; `math.inf` never answers.

    Attributes:
        requests: (prompt ids, generation) of each request, in the order of the answers.
        params: sampling parameters of each request, in the same order.
    """

    def __init__(self, chat: Chat, script: Script, *, version: int = 0, latency_s: float = 0.0) -> None:
        self.chat, self.version, self.latency_s = chat, version, latency_s
        self._script = script
        self._num_turns: Counter[str] = Counter()
        self.requests: list[tuple[list[int], Generation]] = []
        self.params: list[SamplingParams] = []
        self.running = 0
        self._num_pulses = 0

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, rid: str) -> Generation:
        """Return the next turn of the attempt that `rid` names, cut at `params.max_new_tokens`.

        Raises:
            RequestRefused: the script has no further turn.
        """
        trajectory = rid.rpartition("-")[0]
        turn = self._num_turns[trajectory]
        self._num_turns[trajectory] += 1
        self.running += 1
        try:
            whole = written(self.chat, await self.next_turn(turn, self.chat.decode(input_ids)))
            await trio.sleep(self.latency_s)
        finally:
            self.running -= 1
        ids = np.array(whole[: params.max_new_tokens], np.int32)
        # The values are arbitrary but distinct, so that tests notice a misplaced one.
        logprobs = -np.linspace(0.1, 2.0, len(ids), dtype=np.float32) - np.float32(len(input_ids) / 1000)
        versions = np.full(len(ids), self.version, np.int32)
        generation = Generation(ids, logprobs, versions, "stop" if len(ids) == len(whole) else "length")
        self.requests.append((list(input_ids), generation))
        self.params.append(params)
        return generation

    async def stream(
        self, input_ids: Sequence[int], params: SamplingParams, *, rid: str, into: StreamedTokens
    ) -> Generation:
        """Return the next turn as `generate` does, and tell `into` its tokens, a few at a time."""
        generation = await self.generate(input_ids, params, rid=rid)
        for end in range(STREAMED_TOKENS, len(generation.token_ids), STREAMED_TOKENS):
            into.arrived(generation.token_ids[:end].tolist(), partial(_cut_off, generation, end))
            await trio.lowlevel.checkpoint()
        return generation

    async def abort(self, rid: str) -> None:
        """Do nothing: a running turn ends by itself."""

    async def settle_aborts(self) -> None:
        return

    async def serves(self, version: int) -> bool:
        return self.version >= version

    async def pulse(self) -> Pulse:
        """Report changing load, so that the model never counts as hanging: a person, or `latency_s`, may take
        any time.
        """
        self._num_pulses += 1
        return Pulse(is_paused=False, load=ServerLoad(self.running, 0, self._num_pulses, self._num_pulses))

    async def aclose(self) -> None:
        return

    async def next_turn(self, index: int, prompt: str) -> ScriptedTurn:
        """Return turn `index` (from 0) of an attempt. `prompt` is its current prompt as text.

        Raises:
            RequestRefused: the script has no such turn.
        """
        if callable(self._script):
            return self._script(index, prompt)
        if index >= len(self._script):
            raise RequestRefused(
                f"the script has {len(self._script)} turn(s), and the agent asked for turn {index + 1}"
            )
        return self._script[index]


def _cut_off(generation: Generation, end: int) -> Generation:
    """Return the first `end` tokens of a generation, as an aborted one."""
    facts = (generation.token_ids[:end], generation.logprobs[:end], generation.versions[:end])
    return Generation(*facts, "abort")


def written(chat: Chat, turn: ScriptedTurn) -> list[int]:
    """Return the tokens that the model samples for `turn`, including the end of the turn."""
    if isinstance(turn, Raw):
        return [*chat.encode(turn.text), chat.eos_token_ids[0]]
    said = _as_says(turn)
    calls = tuple(
        ToolCall(call_id(0, index), call.name, call.arguments) for index, call in enumerate(said.calls)
    )
    message = Message("assistant", said.text, tool_calls=calls, reasoning=said.reasoning)
    shown = chat.render_training([Message("user", "?"), message], [])
    return [int(id) for id in shown.token_ids[shown.mask]]


def _as_says(turn: ScriptedTurn) -> Says:
    if isinstance(turn, str):
        return Says(turn)
    if isinstance(turn, Call):
        return Says(calls=(turn,))
    if isinstance(turn, Says):
        return turn
    assert not isinstance(turn, Raw)
    return Says(calls=tuple(turn))
