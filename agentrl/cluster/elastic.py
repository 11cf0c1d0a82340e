"""`ElasticServers`: servers that join and leave during a run, on request by `agentrl servers`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import trio

from agentrl.cluster.control import ControlDesk, ControlRequest
from agentrl.cluster.frozen_servers import FrozenFleet
from agentrl.cluster.rollouts import RolloutFleet
from agentrl.cluster.servers import ServerFleet
from agentrl.config.model import ModelConfig
from agentrl.errors import ServerError
from agentrl.servers.client import SGLangClient, for_each

DRAIN_TIMEOUT_S = 10.0
"""Time for a leaving server to return the partial output of its requests; then it is removed anyway."""
ASK_TIMEOUT_S = 30.0


class ElasticServers:
    """Serves the requests of the control desk.

    A joining server takes traffic once it has the weights and is verified.

    Args:
        frozen: the servers of frozen models, which neither join nor leave.
        lone_adapter_of: the model whose LoRA adapter is published alone, so that servers must load adapters;
            None: whole models are published.
        replays_experts: whether servers must record experts (`rollout.replay_experts`).
    """

    def __init__(
        self,
        servers: ServerFleet,
        rollouts: RolloutFleet,
        frozen: FrozenFleet,
        *,
        lone_adapter_of: ModelConfig | None,
        replays_experts: bool,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        self._servers = servers
        self._rollouts = rollouts
        self._frozen = frozen
        self._asks: list[Ask] = []
        if lone_adapter_of is not None:
            self._asks.append(partial(why_no_adapter, model=lone_adapter_of))
        if replays_experts:
            self._asks.append(why_no_experts)
        self._say = say
        self._desk = ControlDesk(run_dir)
        self._able: set[str] = set()

    def attend(self, *, version: int) -> None:
        """Poll the servers, answer pending requests, and write the table of servers.

        Raises:
            InfrastructureError: a server that is no guest is lost for good, or none is left.
        """
        self._servers.poll()
        self._frozen.poll()
        self._rollouts.set_frozen_servers(self._frozen.keys)
        self._desk.serve(lambda request: self._act(request, version))
        for url in self._servers.guests_needing_weights if self._asks else ():
            self._ask(url)
        self._desk.show(
            [*self._servers.lines, *self._frozen.lines],
            version=version,
            outstanding_tokens=self._rollouts.outstanding_tokens,
            actors=self._rollouts.lines,
        )

    def _act(self, request: ControlRequest, version: int) -> str:
        if request.verb == "drain":
            return self._drain(request.server, version)
        joining = (
            self._servers.attach(request.server)
            if request.verb == "attach"
            else self._servers.start_another()
        )
        self._say(f"server {joining} joins")
        return f"{joining} joins: when it generates, it receives the weights, is checked and then serves"

    def _drain(self, server: str, version: int) -> str:
        """Drain a server: its requests return partial output, and the router continues them elsewhere."""
        leaving = self._servers.leaving(server)
        self._tell(leaving, lambda client: client.pause("abort"))
        self._rollouts.set_servers([url for url in self._servers.urls if url != leaving], version=version)
        self._tell(leaving, SGLangClient.resume)  # others may use it, too
        self._servers.remove(leaving)
        self._say(f"server {leaving} left")
        return f"{leaving} left: its trajectories continue on other servers"

    def _tell(self, url: str, verb: Callable[[SGLangClient], Awaitable[None]]) -> None:
        """Call a verb of a leaving server, which leaves even if it does not obey."""
        self._servers.talk(
            [url], partial(for_each, action=verb, timeout_s=DRAIN_TIMEOUT_S, limit="the time to drain")
        )

    def _ask(self, url: str) -> None:
        """Remove a guest that lacks what all other servers have."""
        if url in self._able:
            return
        for ask in self._asks:
            why = self._servers.talk([url], ask)
            if why is not None:
                self._say(f"server {url} cannot join: {why}")
                self._servers.remove(url)
                return
        self._able.add(url)


Ask = Callable[[Sequence[SGLangClient]], Awaitable[str | None]]
"""Return why one of the servers cannot serve the run; None if all can."""


async def why_no_adapter(servers: Sequence[SGLangClient], *, model: ModelConfig) -> str | None:
    """Return why a server cannot load the LoRA adapter of `model` alone; None if all can.

    Raises:
        ServerError: a server did not answer within ASK_TIMEOUT_S.
    """
    return await _first_objection(servers, partial(_objection, model=model), "it loads LoRA adapters")


async def why_no_experts(servers: Sequence[SGLangClient]) -> str | None:
    """Return why a server cannot say which experts computed a token; None if all can.

    Raises:
        ServerError: a server did not answer within ASK_TIMEOUT_S.
    """
    return await _first_objection(servers, _objection_to_replay, "it records experts")


async def _first_objection(
    servers: Sequence[SGLangClient], objection: Callable[[SGLangClient], Awaitable[str | None]], what: str
) -> str | None:
    for server in servers:
        try:
            with trio.fail_after(ASK_TIMEOUT_S):
                why = await objection(server)
        except trio.TooSlowError:
            raise ServerError(
                f"{server.url} did not report within {ASK_TIMEOUT_S:g} s whether {what}"
            ) from None
        if why is not None:
            return why
    return None


async def _objection_to_replay(server: SGLangClient) -> str | None:
    if await server.records_experts():
        return None
    return (
        f"{server.url} does not record which experts computed a token; start SGLang with "
        "--enable-return-routed-experts, and serve a mixture of experts"
    )


async def _objection(server: SGLangClient, model: ModelConfig) -> str | None:
    rank, max_rank = model.lora.rank, await server.max_adapter_rank()
    if max_rank < rank:
        able = f"adapters up to rank {max_rank}" if max_rank else "no LoRA adapters"
        return f"{server.url} loads {able}, but model.lora.rank is {rank}"
    served = (await server.model_info()).model_path
    if served != model.path and Path(served).resolve() != Path(model.path).resolve():
        return f"{server.url} serves {served!r}, but the adapter belongs to model.path={model.path!r}"
    return None
