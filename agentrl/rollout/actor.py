"""The Ray actor of one rollout process: Ray's threads call into one trio loop that runs in its own thread.

All methods are synchronous: one `async def` makes a Ray actor an asyncio actor, and trio inside of it
deadlocks.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import ray
import trio
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayTaskError

from agentrl.adapters.catalog import open_plugins
from agentrl.chat.chat import Chat
from agentrl.config.schema import Config
from agentrl.data.trajectories import encode, to_ipc
from agentrl.errors import AgentRLError, InfrastructureError, JournalError
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.attempt_log import AttemptReport
from agentrl.rollout.garbage import OldGarbage, collect_rarely
from agentrl.rollout.limits import model_limits, num_ids_of, server_key
from agentrl.rollout.loop_gaps import LoopGaps
from agentrl.rollout.manager import AgentLoopManager, TaskSource
from agentrl.rollout.open_files import allow_trajectories
from agentrl.rollout.play_loop import PlayLoop
from agentrl.rollout.player_stack import Validating
from agentrl.rollout.router import Router
from agentrl.rollout.scopes import LiveScopes
from agentrl.rollout.session import PromptLimits
from agentrl.rollout.shipment import TrajectorySink
from agentrl.sglang.client import SGLangClient
from agentrl.sglang.protocol import POLICY_ADAPTER
from agentrl.sglang.router import SGLangRouterClient
from agentrl.types import Lease, Trajectory

T = TypeVar("T")

LEASE_WAIT_S = 5.0
"""Duration of one long poll for leases."""
BUFFER_TIMEOUT_S = 120.0
"""If the buffer does not answer for this long, the process ends, and its leases go to another owner."""
JOURNAL_PAUSE_S = 1.0
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


class Buffer(TaskSource, TrajectorySink, Protocol):
    """The rollout side of the replay buffer: source of leases and sink of trajectories."""


class RemoteBuffer:
    """The replay buffer's actor as TaskSource and TrajectorySink, for the leases of `owner`.

    Each `lease` reports the groups that it knows of, so that the buffer returns a group again if an answer
    was lost. If the buffer cannot write (its disk is full), the trajectory waits here, and later ones wait
    behind it.
    """

    def __init__(self, owner: str, actor: ActorHandle, *, patience_s: float = 0.0) -> None:
        """`patience_s`: seconds for which a call is retried while the buffer cannot write."""
        self._owner = owner
        self._actor = actor
        self._patience_s = patience_s
        self._threads = trio.CapacityLimiter(4)
        self._missing: dict[int, set[int]] = {}  # group id -> members neither added nor left out yet

    async def lease(self, limit: int) -> Sequence[Lease]:
        leases: list[Lease] = await self._call(self._actor.lease, limit, LEASE_WAIT_S, tuple(self._missing))
        for lease in leases:
            self._missing[lease.group_id] = set(range(lease.num_attempts))
        return leases

    async def withdrawn(self) -> Sequence[int]:
        asked = dict(self._missing)
        gone: Sequence[int] = await self._call(self._actor.withdrawn, tuple(asked))
        mine = [group_id for group_id in gone if self._missing.get(group_id) is asked[group_id]]  # not ended or leased again since
        for group_id in mine:
            del self._missing[group_id]
        return mine

    async def add(self, trajectories: Sequence[Trajectory]) -> None:
        await self._call(self._actor.add, to_ipc(encode(trajectories)))
        for trajectory in trajectories:
            self._account_for(trajectory.group_id, trajectory.member)

    async def drop_group(self, group_id: int, reason: str) -> None:
        await self._call(self._actor.drop_group, group_id, reason)
        self._missing.pop(group_id, None)

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        await self._call(self._actor.leave_out, group_id, member, reason)
        self._account_for(group_id, member)

    def _account_for(self, group_id: int, member: int) -> None:
        missing = self._missing.get(group_id, set())
        missing.discard(member)
        if not missing:
            self._missing.pop(group_id, None)

    async def _call(self, method: Any, *args: Any) -> Any:
        deadline = trio.current_time() + self._patience_s
        while True:
            try:
                return await trio.to_thread.run_sync(partial(self._ask, method, *args), abandon_on_cancel=True, limiter=self._threads)
            except JournalError:
                if trio.current_time() > deadline:
                    raise
                await trio.sleep(JOURNAL_PAUSE_S)

    def _ask(self, method: Any, *args: Any) -> Any:
        try:
            return ray.get(method.remote(self._owner, *args), timeout=BUFFER_TIMEOUT_S)
        except GetTimeoutError as error:
            raise InfrastructureError(f"the replay buffer did not answer within {BUFFER_TIMEOUT_S:g} s") from error
        except RayTaskError as error:
            if isinstance(error.cause, AgentRLError):  # e.g. a DataError: a file changed since the data was opened
                raise error.cause from error
            raise


def validating(config: Config) -> Validating | None:
    """Return the settings of validation that differ from training; None if there are none."""
    own = config.of_validation
    return None if own is config else Validating(own.agent.tools, own.reward)


class RolloutWorker:
    """RolloutActor without Ray: an AgentLoopManager in a trio thread, called from other threads."""

    def __init__(self, config: Config, buffer: Buffer | None) -> None:
        """Load tokenizer, plugins and rewards, and start the thread. `buffer` None: only `play` can be used.

        Raises:
            UserError: one of them is missing or wrong, or the trajectories need more open files than this
                machine allows.
        """
        num_trajectories = config.rollout.max_concurrent_trajectories
        allow_trajectories(num_trajectories)
        self._config = config
        self._buffer = buffer
        model = config.model
        chat = Chat.of(model)
        named_key = server_key(config.rollout.api_key_env)
        vocab_size, context_tokens = model_limits(model, chat)
        adapter = POLICY_ADAPTER if config.rollout.weights.adapter == "alone" else None
        num_ids = num_ids_of(model)
        options: dict[str, Any] = {"adapter": adapter, "max_connections": num_trajectories, "num_ids": num_ids}
        self._keys: Mapping[str, str | None] = {}  # server URL -> API key

        def connect(url: str) -> SGLangClient:
            return SGLangClient(url, api_key=self._keys.get(url), **options)

        self._front_url = config.rollout.front_url
        behind = partial(SGLangRouterClient, behind=lambda: tuple(self._keys), connect=connect, api_key=named_key, **options)
        self._router = Router(
            connect if self._front_url is None else behind,
            vocab_size=vocab_size,
            context_tokens=context_tokens,
            max_silence_s=config.rollout.max_server_silence_s,
            max_pause_s=config.rollout.weights.timeout_s,
        )
        self._host = AsyncioHost()
        self._manager = AgentLoopManager(
            config.agent,
            config.rollout,
            config.reward,
            plugins=open_plugins(config.agent),
            chat=chat,
            router=self._router,
            host=self._host,
            prompt=PromptLimits(config.data.max_prompt_tokens, config.data.overlong_prompts),
            attempts_per_group=config.attempts_per_group,
            validation=validating(config),
        )
        self._gaps = LoopGaps()
        self._old_garbage = OldGarbage()
        self._calls: set[trio.CancelScope] = set()
        self._is_started = threading.Event()
        self._thread = threading.Thread(target=self._run_loop, name="rollout", daemon=True)
        self._thread.start()
        if not self._is_started.wait(START_TIMEOUT_S):
            raise InfrastructureError(f"the event loop of a rollout actor did not start within {START_TIMEOUT_S:g} s")

    def run(self) -> None:
        """Play the groups that the buffer leases. Returns after `stop`."""
        assert self._buffer is not None, "an actor without a buffer only plays what it is given"
        self._call(self._manager.run, self._buffer, self._buffer)

    def play(self, leases: Sequence[Lease]) -> bytes:
        """Play `leases` with the `eval` sampling and return all trajectories as an Arrow IPC stream.

        Raises:
            InfrastructureError: `stop` was called before the end.
        """
        options = self._config.eval
        trajectories = self._call(partial(self._manager.play, timeout_s=options.timeout_s), leases, options)
        if trajectories is None:
            raise InfrastructureError("the rollout actor was stopped during validation")
        return to_ipc(encode(trajectories))

    def set_servers(self, keys: Mapping[str, str | None], version: int) -> None:
        """Use these servers (URL -> API key).

        A server that joins must first have weights of at least `version`.
        """

        def set_servers() -> None:
            self._keys = dict(keys)
            urls = [self._front_url] if keys and self._front_url is not None else list(keys)
            self._router.set_servers(urls, version=version)
            self._old_garbage.collect()  # after a publish the servers have all requests, so a pause is cheap

        trio.from_thread.run_sync(set_servers, trio_token=self._token)

    def outstanding_tokens(self) -> dict[str, int]:
        """Return the estimated number of tokens still to be computed for running requests, by URL."""
        return self._router.outstanding_tokens()

    def stats(self) -> dict[str, float]:
        return self._manager.stats() | self._gaps.counters()

    def attempts(self, position: int) -> AttemptReport:
        """Return how training attempts ended, with the failures from `position` on.

        Works even if the event loop is blocked.
        """
        return self._manager.attempts.since(position)

    def scopes(self, limit: int) -> LiveScopes:
        """Return the live scopes, at most `limit` of them in full.

        Works even if the event loop is blocked.
        """
        return self._loop.look(self._manager.scopes, limit=limit, places=self._router.places())

    def stop(self) -> None:
        """End `run` and `play`: cancel agents, close tools, abort running generations. Idempotent."""
        with suppress(trio.RunFinishedError):
            trio.from_thread.run_sync(self._stopping.set, trio_token=self._token)
        self._thread.join(STOP_TIMEOUT_S)

    def _call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T | None:
        """Run `function(*args)` in the trio thread; None if `stop` cancelled it."""

        async def cancellable() -> T | None:
            with trio.CancelScope() as scope:
                if self._stopping.is_set():
                    scope.cancel()
                self._calls.add(scope)
                try:
                    return await function(*args)
                finally:
                    self._calls.discard(scope)
                    self._call_ended.set()
            return None

        return trio.from_thread.run(cancellable, trio_token=self._token)

    def _run_loop(self) -> None:
        trio.run(self._main, instruments=[self._gaps])

    async def _main(self) -> None:
        """Main task of the trio thread. All calls from outside end before the plugins' asyncio loop does."""
        self._token = trio.lowlevel.current_trio_token()
        self._loop = PlayLoop.here(self._gaps, plugins=self._host.thread)
        self._stopping, self._call_ended = trio.Event(), trio.Event()
        self._is_started.set()
        with self._host:
            await self._stopping.wait()  # until `stop` is called
            for scope in self._calls:
                scope.cancel()
            while self._calls:
                self._call_ended = trio.Event()
                await self._call_ended.wait()  # unbounded: `stop` waits STOP_TIMEOUT_S, then the process is killed
            await self._manager.aclose()
            await self._router.aclose()


@ray.remote(num_cpus=0, max_concurrency=8)  # type: ignore[call-overload]  # not in ray's stubs
class RolloutActor:
    """Plays tasks as lease owner `owner`; see RolloutWorker. `buffer` None: only `play` can be used."""

    def __init__(self, owner: str, config: Config, buffer: ActorHandle | None) -> None:
        pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own keeps for each thread what that thread has freed
        self._part = RolloutWorker(
            config, None if buffer is None else RemoteBuffer(owner, buffer, patience_s=config.buffer.disk_patience_s)
        )
        collect_rarely()

    def run(self) -> None:
        self._part.run()

    def play(self, leases: Sequence[Lease]) -> bytes:
        return self._part.play(leases)

    def set_servers(self, keys: Mapping[str, str | None], version: int) -> None:
        self._part.set_servers(keys, version)

    def outstanding_tokens(self) -> dict[str, int]:
        return self._part.outstanding_tokens()

    def stats(self) -> dict[str, float]:
        return self._part.stats()

    def attempts(self, position: int) -> AttemptReport:
        return self._part.attempts(position)

    def scopes(self, limit: int) -> LiveScopes:
        return self._part.scopes(limit)

    def stop(self) -> None:
        self._part.stop()
