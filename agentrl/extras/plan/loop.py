"""`LearnerLoop`: the controller's loop of a simulation.

It makes the calls of `agentrl.controller.train` in the same order (tests/extras/plan/test_loop.py compares
them), and waits where real ranks would compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import trio

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.config.schema import Config
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import RankLost
from agentrl.extras.plan.engine import VirtualServer
from agentrl.extras.plan.fleet import VirtualFleet
from agentrl.extras.plan.process import BufferProcess

POLL_S = 1.0
"""Seconds that one request for a batch waits, as `controller.batches` has it."""


class LoopCosts(Protocol):
    """Seconds that the learner's side takes."""

    def take_s(self, batch: Sequence[AttemptFacts]) -> float:
        """Return the time of the driver for a batch: decode, credit, pack, send to the ranks."""

    def learn_s(self, batch: Sequence[AttemptFacts]) -> float:
        """Return the time of the ranks for a batch."""

    def send_s(self) -> float:
        """Return the time of a publish before it pauses servers."""

    def load_s(self) -> float:
        """Return for how long a publish pauses a server."""

    def save_s(self) -> tuple[float, float]:
        """Return for how long a checkpoint stops the loop, and how long it is written in the background."""

    def restart_s(self) -> float:
        """Return the time in which a server, or the ranks, start again."""


class Watch(Protocol):
    """Is told what the loop does."""

    def spent(self, phase: str, seconds: float) -> None: ...

    def took(self, step: int, batch: Sequence[AttemptFacts]) -> None: ...

    def published(self, version: int, step: int) -> None: ...

    def stepped(self, step: int) -> None: ...

    def released(self, owner: str) -> None: ...


@dataclass(frozen=True, slots=True)
class SavedState:
    """A checkpoint. written_at: when it is complete."""

    step: int
    buffer_state: bytes
    written_at: float


class DurableState:
    """What survives the driver, on disk: the newest version, the newest checkpoint, one being written."""

    def __init__(self) -> None:
        self.newest_version = -1
        self.checkpoint: SavedState | None = None
        self.pending: SavedState | None = None

    def stop(self, now: float) -> None:
        """End with the driver: a checkpoint that is complete counts, one that is not is lost."""
        if self.pending is not None and self.pending.written_at <= now:
            self.checkpoint = self.pending
        self.pending = None


class LearnerLoop:
    """The loop of one driver.

    fails: asked with a kind of fault; returns whether it happens now.
    """

    def __init__(
        self,
        config: Config,
        process: BufferProcess,
        fleet: VirtualFleet,
        costs: LoopCosts,
        progress: DurableState,
        watch: Watch,
        *,
        total_steps: int,
        fails: Callable[[str], bool] = lambda kind: False,
    ) -> None:
        self._config = config
        self._process = process
        self._fleet = fleet
        self._costs = costs
        self._progress = progress
        self._watch = watch
        self._total_steps = total_steps
        self._fails = fails
        self._behind: set[str] = set(fleet.engines)  # servers that need weights
        self._restarting: dict[str, float] = {}  # server -> when it is up again
        self.version = -1
        self.step = 0 if progress.checkpoint is None else progress.checkpoint.step

    async def run(self) -> None:
        """Make all steps, as `train` does."""
        await self.publish()
        self._fleet.start_actors()
        while self.step < self._total_steps:
            try:
                await self.train_step()
                if self._config.trainer.save_freq > 0 and self.step % self._config.trainer.save_freq == 0:
                    await self.save()
            except RankLost:
                await self._recover()

    async def train_step(self) -> None:
        """Take one batch, train on it, publish."""
        batch = await self.take()
        with self._phase("learn"):
            await self.learn(batch)
        self.step += 1
        with self._phase("publish"):
            await self.publish()
        self._watch.stepped(self.step)

    # -------------------------------------------------------------------------------------------------- verbs

    async def take(self) -> Sequence[AttemptFacts]:
        """Wait for the next batch. One whose rewards of scope `batch` fail is replaced by the next."""
        await self._settle()
        while True:
            with self._phase("take"):
                batch = await self._wait_for_groups()
            with self._phase("credit and pack"):
                await trio.sleep(self._costs.take_s(batch))
            if not self._fails("reject"):
                return batch
            await self._process.run_async(ReplayBuffer.reject, self.step + 1, "reward_error")

    async def _wait_for_groups(self) -> Sequence[AttemptFacts]:
        num_groups, step = self._config.buffer.groups_per_step, self.step + 1
        while True:
            batch = await self._process.run_async(ReplayBuffer.take, num_groups, POLL_S, step)
            if batch is not None:
                break
            await self.heal()
        self._watch.took(step, batch)
        return batch

    async def learn(self, batch: Sequence[AttemptFacts]) -> None:
        """Wait for as long as the driver and the ranks work on a batch."""
        if self._config.rollout.colocated:
            for engine in self._fleet.engines.values():
                if not engine.is_dead:
                    engine.pause("abort")
        seconds = self._costs.learn_s(batch)
        await trio.sleep(seconds / 2)
        if self._fails("rank"):
            raise RankLost("a rank of the learner is lost")
        await trio.sleep(seconds / 2)

    async def publish(self) -> None:
        """Give the weights a new version, bring every server to it, and tell the buffer."""
        await self.heal_actors()
        self.version = self._progress.newest_version = self._progress.newest_version + 1
        self._behind = set(self._fleet.engines)
        await self._send()
        await self._process.run_async(ReplayBuffer.advance, self.version, self.step)
        self._watch.published(self.version, self.step)

    async def heal(self) -> None:
        """Replace dead actors, and bring restarted servers to the current version."""
        await self.heal_actors()
        for url, engine in self._fleet.engines.items():
            hangs = engine.silent_s() > self._config.rollout.server_hang_timeout_s
            if (engine.is_dead or hangs) and url not in self._restarting:
                self._restart(url)
        if any(self._restarting.get(url, 0.0) <= trio.current_time() for url in self._behind):
            await self._send()

    async def heal_actors(self) -> None:
        """Replace dead rollout actors."""
        await self._fleet.heal(self._release)

    async def _release(self, owner: str) -> None:
        await self._process.run_async(ReplayBuffer.release, owner)
        self._watch.released(owner)

    async def save(self) -> None:
        """Start writing a checkpoint of this step."""
        with self._phase("save"):
            await self._wait_for_checkpoint()
            state = await self._process.run_async(ReplayBuffer.state)
            stop_s, write_s = self._costs.save_s()
            await trio.sleep(stop_s)
            self._progress.pending = SavedState(self.step, state, trio.current_time() + write_s)

    # ------------------------------------------------------------------------------------------------ servers

    async def _send(self) -> None:
        """Send the weights to all servers that need them. A server that does not load them is restarted."""
        urls = [url for url in self._fleet.engines if url in self._behind and self._is_reachable(url)]
        await trio.sleep(self._costs.send_s())
        async with trio.open_nursery() as nursery:
            for url in urls:
                nursery.start_soon(self._load, url)
        ready = [url for url in self._fleet.engines if url not in self._behind]
        self._fleet.set_servers(ready, version=self.version)

    def _is_reachable(self, url: str) -> bool:
        engine = self._fleet.engines[url]
        if url in self._restarting:
            if self._restarting[url] > trio.current_time():
                return False
            del self._restarting[url]
            engine.restart()
        elif engine.is_dead or engine.is_hanging:
            self._restart(url)
            return False
        return True

    async def _load(self, url: str) -> None:
        engine: VirtualServer = self._fleet.engines[url]
        rollout = self._config.rollout
        engine.pause(rollout.pause_mode_of(rollout.backend))
        await trio.sleep(self._costs.load_s())
        if engine.is_dead or self._fails("publish"):
            self._restart(url)
            return
        engine.set_version(self.version)
        engine.resume()
        self._behind.discard(url)

    def _restart(self, url: str) -> None:
        engine = self._fleet.engines[url]
        if not engine.is_dead:
            engine.die()
        self._behind.add(url)
        self._restarting[url] = trio.current_time() + self._costs.restart_s()

    # -------------------------------------------------------------------------------------------- checkpoints

    async def _settle(self) -> None:
        """Tell the buffer of a checkpoint that was completed meanwhile."""
        pending = self._progress.pending
        if pending is not None and pending.written_at <= trio.current_time():
            self._progress.pending, self._progress.checkpoint = None, pending
            await self._process.run_async(ReplayBuffer.settle, pending.step)

    async def _wait_for_checkpoint(self) -> None:
        if self._progress.pending is not None:
            await trio.sleep_until(self._progress.pending.written_at)
            await self._settle()

    async def _recover(self) -> None:
        """Restart the ranks from the newest checkpoint, as `Ranks.recovering` and `Run.go_back` do."""
        with self._phase("recover"):
            if self._progress.pending is not None:  # it completes on disk, but the buffer is not told
                await trio.sleep_until(self._progress.pending.written_at)
                self._progress.stop(trio.current_time())
            await trio.sleep(self._costs.restart_s())
            checkpoint = self._progress.checkpoint
            self.step = 0 if checkpoint is None else checkpoint.step
            await self._process.run_async(ReplayBuffer.roll_back, self.step)
            await self.publish()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = trio.current_time()
        yield
        self._watch.spent(name, trio.current_time() - started)
