"""`EngineClient`: an engine as the router sees a server, in place of `SGLangClient`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.errors import ServerError
from agentrl.extras.plan.engine import VirtualServer
from agentrl.extras.plan.turns import Turns
from agentrl.servers.protocol import Pulse
from agentrl.types import Generation, SamplingParams


class EngineClient:
    """Calls `engine` without a network. `turns` has the lengths of the turns that are being sampled."""

    def __init__(self, engine: VirtualServer, turns: Turns) -> None:
        self._engine = engine
        self._turns = turns

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, *, rid: str) -> Generation:
        key = rid.rpartition("-")[0]
        rest, value = self._turns.rest(key, params.max_new_tokens)
        # The members of a group begin with the same token, which names their prompt.
        prefixes = (key, f"prompt {input_ids[0]}")
        return await self._engine.generate(rid, len(input_ids), rest, value, prefixes)

    async def abort(self, rid: str) -> None:
        if self._engine.is_dead or self._engine.is_hanging:
            raise ServerError("connection refused")
        self._engine.abort(rid)

    async def settle_aborts(self) -> None:
        """Return at once: a cancelled request leaves an engine at once."""

    async def serves(self, version: int) -> bool:
        return await self._engine.serves(version)

    async def pulse(self) -> Pulse:
        return await self._engine.pulse()

    async def aclose(self) -> None:
        """Return at once: there is no connection."""
