"""`RolloutWorker`: what one rollout process does. Its callers' threads call into one trio loop, which runs in
its own thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import trio

from agentrl.adapters.catalog import open_plugins
from agentrl.chat.chat import Chat
from agentrl.config.agent import AgentConfig
from agentrl.config.data import DataConfig
from agentrl.config.distillation import DistillationConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.model import ModelConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.config.schema import Config
from agentrl.config.tracking import SpansConfig
from agentrl.data.trajectories import encode, to_ipc
from agentrl.errors import InfrastructureError
from agentrl.plugins.last_words import end_with_last_words
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.attempt_log import AttemptReport
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.rollout.frozen_servers import StartedKeys
from agentrl.rollout.garbage import OldGarbage
from agentrl.rollout.limits import model_limits, num_ids_of, server_key
from agentrl.rollout.loop_gaps import LoopGaps
from agentrl.rollout.loop_watch import POLL_S, LoopWatch, WatchedLoop
from agentrl.rollout.manager import AgentLoopManager, TaskSource
from agentrl.rollout.open_files import allow_trajectories
from agentrl.rollout.player_stack import PlayerParts, Validating
from agentrl.rollout.scopes import LiveScopes, PlayLoop
from agentrl.rollout.shipment import TrajectorySink
from agentrl.rollout.shown_images import ShownImages
from agentrl.rollout.teacher import Teacher
from agentrl.rollout.tracing import open_tracing
from agentrl.rollout.warned import ToldWarnings
from agentrl.servers.client import SGLangClient
from agentrl.servers.front_router import SGLangRouterClient
from agentrl.servers.protocol import POLICY_ADAPTER
from agentrl.servers.router import Router
from agentrl.servers.server import Client
from agentrl.tracking.spans import Span
from agentrl.types import Lease, ServerPause

T = TypeVar("T")

log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


class Buffer(TaskSource, TrajectorySink, Protocol):
    """The rollout side of the replay buffer: source of leases and sink of trajectories."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """What rollout workers need of a run's config: its sections, and what follows from several of them.

    attempts_per_group: of training, the greedy one included.
    run: name of the run, for traces.
    images: folder of the images that tools and partners show; None: notes stand for them.
    validation: settings of validation that differ from training; None if there are none.
    """

    agent: AgentConfig
    rollout: RolloutConfig
    reward: RewardConfig
    model: ModelConfig
    data: DataConfig
    eval: EvalConfig
    spans: SpansConfig
    distillation: DistillationConfig
    attempts_per_group: int
    run: str
    validation: Validating | None
    images: Path | None = None

    @classmethod
    def of(cls, config: Config, *, images: Path | None = None) -> RolloutSettings:
        own = config.of_validation
        validation = None if own is config else Validating(own.agent.tools, own.reward)
        return cls(
            config.agent,
            config.rollout,
            config.reward,
            config.model,
            config.data,
            config.eval,
            config.tracking.spans,
            config.algorithm.distillation,
            attempts_per_group=config.attempts_per_group,
            run=f"{config.trainer.project_name}/{config.trainer.experiment_name}",
            validation=validation,
            images=images,
        )


class RolloutWorker:
    """An AgentLoopManager in a trio thread, called from other threads. Methods are synchronous."""

    def __init__(self, settings: RolloutSettings, buffer: Buffer | None) -> None:
        """Load tokenizer, plugins and rewards, and start the thread. `buffer` None: only `play` can be used.

        Raises:
            UserError: one of them is missing or wrong, or the trajectories need more open files than this
                machine allows.
        """
        rollout = settings.rollout
        num_trajectories = rollout.max_concurrent_trajectories
        allow_trajectories(num_trajectories)
        self._eval = settings.eval
        self._deadline_s = settings.agent.trajectory_timeout_s
        self._buffer = buffer
        model = settings.model
        chat = Chat.of(model)
        named_key = server_key(rollout.api_key_env)
        vocab_size, context_tokens = model_limits(model, chat)
        adapter = POLICY_ADAPTER if rollout.weights.adapter == "alone" else None
        num_ids = num_ids_of(model)
        options: dict[str, Any] = {
            "adapter": adapter,
            "max_connections": num_trajectories,
            "num_ids": num_ids,
        }
        self._keys: Mapping[str, str | None] = {}  # server URL -> API key

        def connect(url: str) -> SGLangClient:
            return SGLangClient(url, api_key=self._keys.get(url), **options)

        self._front_url = rollout.front_url
        behind = partial(
            SGLangRouterClient,
            behind=lambda: tuple(self._keys),
            connect=connect,
            api_key=named_key,
            **options,
        )
        self._tracing = open_tracing(settings.spans, run=settings.run)
        connect_to: Callable[[str], Client] = connect if self._front_url is None else behind
        self._router = Router(
            connect_to if self._tracing is None else self._tracing.connecting(connect_to),
            vocab_size=vocab_size,
            context_tokens=context_tokens,
            max_silence_s=rollout.max_server_silence_s,
            max_pause_s=rollout.weights.timeout_s,
        )
        self._host = AsyncioHost()
        self._manager = AgentLoopManager(
            settings.agent,
            rollout,
            settings.reward,
            self._router,
            PlayerParts(
                open_plugins(settings.agent),
                chat,
                self._host,
                PromptLimits.of(settings.data),
                frozen_patience_s=rollout.server_start_timeout_s,
                adapters=model.lora.adapter_of_conversation,
                teacher=Teacher.of(settings.distillation),
                images=None
                if settings.images is None
                else ShownImages(settings.data.images, settings.images),
            ),
            attempts_per_group=settings.attempts_per_group,
            validation=settings.validation,
            tracer=None if self._tracing is None else self._tracing.attempts,
        )
        self._gaps = LoopGaps()
        self._old_garbage = OldGarbage()
        self._calls: set[trio.CancelScope] = set()
        self._is_started = threading.Event()
        self._warned = ToldWarnings()
        loop = partial(trio.run, self._main, instruments=[self._gaps])
        self._thread = threading.Thread(target=loop, name="rollout", daemon=True)
        self._thread.start()
        if not self._is_started.wait(START_TIMEOUT_S):
            raise InfrastructureError(
                f"the event loop of a rollout actor did not start within {START_TIMEOUT_S:g} s"
            )

    def run(self) -> None:
        """Play the groups that the buffer leases. Returns after `stop`."""
        assert self._buffer is not None, "an actor without a buffer cannot lease groups"
        self._call(self._manager.run, self._buffer, self._buffer)

    def play(self, leases: Sequence[Lease]) -> bytes:
        """Play `leases` with the `eval` sampling and return all trajectories as an Arrow IPC stream.

        Raises:
            InfrastructureError: `stop` was called before the end.
        """
        options = self._eval
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

    def set_frozen_servers(self, started: StartedKeys) -> None:
        """Use these servers for the opponents and the teacher that servers were started for."""
        trio.from_thread.run_sync(self._manager.set_frozen_servers, started, trio_token=self._token)

    def outstanding_tokens(self) -> dict[str, int]:
        """Return the estimated number of tokens still to be computed for running requests, by URL."""
        return self._router.outstanding_tokens()

    def stats(self) -> dict[str, float]:
        spans = {} if self._tracing is None else self._tracing.counters()
        return self._manager.stats() | self._gaps.counters() | spans

    def attempts(self, position: int, warning: int) -> AttemptReport:
        """Return how training attempts ended, with the failures from `position` on, and the warnings of this
        process from number `warning` on.

        Works even if the event loop is blocked.
        """
        return replace(self._manager.attempts.since(position), warnings=self._warned.since(warning))

    def scopes(self, limit: int) -> LiveScopes:
        """Return the live scopes, at most `limit` of them in full.

        Works even if the event loop is blocked.
        """
        return self._loop.look(self._manager.scopes, limit=limit, places=self._router.places())

    def trace_pauses(self, pauses: Sequence[ServerPause]) -> None:
        """Add pauses of servers to the traces of the attempts that they held up."""
        if self._tracing is not None:
            trio.from_thread.run_sync(self._tracing.paused, pauses, trio_token=self._token)

    def trace(self, spans: Sequence[Span]) -> None:
        """Send spans of the controller to the collector."""
        if self._tracing is not None:
            self._tracing.offer(spans)

    def span_problem(self) -> str:
        """Return why the collector did not take spans most recently; "" if it took all."""
        return "" if self._tracing is None else self._tracing.problem()

    def stop(self) -> None:
        """End `run` and `play`: cancel agents, close tools, abort running generations. Idempotent."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._stopping.set)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline and not self._watch.is_blocked:
            self._thread.join(POLL_S)
        if self._tracing is not None:
            self._tracing.close()

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

    async def _main(self) -> None:
        """Main task of the trio thread. All calls from outside end before the plugins' asyncio loop does."""
        self._token = trio.lowlevel.current_trio_token()
        self._loop = PlayLoop.here(self._gaps, plugins=self._host.thread)
        self._stopping, self._call_ended = trio.Event(), trio.Event()
        self._watch = LoopWatch(
            [
                WatchedLoop(self._thread, self._token.run_sync_soon),
                WatchedLoop(self._host.thread, self._host.call_soon),
            ],
            say=log.warning,
            deadline_s=self._deadline_s,
            end=end_with_last_words,
        )
        self._is_started.set()
        with self._warned, self._host, self._watch:
            await self._stopping.wait()  # until `stop` is called
            for scope in self._calls:
                scope.cancel()
            while self._calls:
                self._call_ended = trio.Event()
                await (
                    self._call_ended.wait()
                )  # unbounded: `stop` waits STOP_TIMEOUT_S, then the process is killed
            await self._manager.aclose()
            await self._router.aclose()
