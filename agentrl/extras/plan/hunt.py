"""The hunt: random schedules with faults against the laws of the ledger, each a function of its seed."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import trio

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.ledger import LedgerRules
from agentrl.config.schema import Config
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.errors import ConfigError
from agentrl.extras.plan.clock import run_virtually
from agentrl.extras.plan.draws import Draws
from agentrl.extras.plan.engine import ServerSpeed
from agentrl.extras.plan.faults import AT_A_CALL, Fault, Occasions, draw_faults, without
from agentrl.extras.plan.fleet import FOLDER, VirtualFleet
from agentrl.extras.plan.laws import Laws, Violation
from agentrl.extras.plan.loop import DurableState, LearnerLoop
from agentrl.extras.plan.process import BufferProcess, WatchedJournal
from agentrl.extras.plan.turns import Turns
from agentrl.extras.plan.workload import Drawn, Scripts, Workload
from agentrl.types import Task

STALL_S = 4000.0
"""A run that makes no step for this long has stalled. Longer than leases last, and any fault."""
_SLOW_TIMEOUT_S = 100.0
"""A server may be very slow if attempts have at least this long."""
_FAULTS_UNTIL_S = 120.0
_MOST_FAULTS = 6
_WATCH_S = 20.0
_REPORT_EVERY = 500


@dataclass(frozen=True, slots=True)
class Schedule:
    """A hunted schedule: all that decides what happens.

    kept: numbers of the faults that happen; None: all.
    """

    seed: int
    kept: tuple[int, ...] | None = None

    @property
    def command(self) -> str:
        """The command that replays it."""
        kept = "" if self.kept is None else f" --faults={','.join(map(str, self.kept)) or 'none'}"
        return f"agentrl simulate --hunt=1 --seed={self.seed}{kept}"


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """What a schedule came to.

    law: the law that was violated, with what happened; None: all laws hold. An exception of the code under
        test violates the law `crash`.
    fingerprint: hash of all events.
    """

    schedule: Schedule
    faults: tuple[Fault, ...]
    num_events: int
    fingerprint: str
    virtual_s: float
    law: str | None = None
    what: str = ""


class Tasks:
    """Tasks without content: `agentrl.buffer.buffer.TaskSequence`."""

    def task(self, position: int) -> Task:
        return Task(f"task-{position}", "simulated", (), "simulated")


def draw_config(rng: random.Random) -> Config:
    """Return a random small run."""
    size = rng.choice((1, 1, 2, 3))
    sampler = rng.choice(("fifo", "fifo", "fifo", "in_order", "freshest", "windowed"))
    stragglers = "drop" if sampler == "windowed" else "wait" if sampler == "in_order" else None
    drops = size > 1 and sampler != "in_order" and rng.random() < 0.2
    is_sglang = rng.random() < 0.5
    outcomes: dict[str, Any] = {"tool_error": rng.choice(("drop", "retry", "replace"))}
    if size > 1:
        outcomes["timeout"] = rng.choice(("drop", "shrink"))
    return Config.model_validate(
        {
            "agent": {
                "trajectory_timeout_s": rng.choice((30.0, 600.0)),
                "tool_timeout_s": rng.choice((5.0, 30.0)),
            },
            "buffer": {
                "groups_per_step": rng.randint(1, 3),
                "max_staleness": rng.choice((0, 0, 1, 2, 3)),
                "stragglers": stragglers or rng.choice(("wait", "drop")),
                "sampler": sampler,
                "oversample": rng.choice((1.0, 1.5)) if sampler == "windowed" else 1.0,
                "lease_timeout_s": rng.choice((100.0, 400.0, 3000.0)),
                "duplicate_after_s": rng.choice((None, None, 10.0)),
                "drop_constant_groups": drops,
            },
            "rollout": {
                "backend": "sglang" if is_sglang else "embedded",
                "num_actors": rng.randint(1, 3),
                "num_servers": rng.randint(1, 3),
                "group_size": size,
                "greedy_baseline": rng.choice(("auto", "auto", "always")),
                "max_concurrent_trajectories": rng.choice((1, 2, 4, 8)),
                "on_outcome": outcomes,
                "min_group_size": 1,
                "weights": {
                    "pause_mode": rng.choice(("abort", "retract", "in_place")) if is_sglang else "abort"
                },
            },
            "algorithm": {"advantage": "reinforce_plus_plus"},
            "trainer": {"steps": rng.randint(2, 6), "save_freq": rng.choice((-1, 1, 2, 3))},
        }
    )


def draw_workload(rng: random.Random, config: Config) -> Workload:
    """Return a random workload of short attempts, of which few are very slow."""
    return Workload(
        turns=Drawn("uniform", 1.5, most=3.0),
        turn_tokens=Drawn("lognormal", 20.0, sigma=rng.choice((0.2, 1.0, 1.8)), most=600.0),
        prompt_tokens=Drawn("fixed", 4.0),
        tool_s=Drawn("exponential", 1.0),
        tool_tokens=Drawn("fixed", 2.0),
        max_tokens=2000,
        tool_hang=rng.choice((0.0, 0.05)),
        tool_failure=rng.choice((0.0, 0.1)),
        pass_rate=rng.choice((0.5, 0.9)),
    )


class _Costs:
    """Random, from nothing to longer than a batch takes to play."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._mean_s = rng.choice((0.1, 2.0, 15.0))

    def take_s(self, batch: Sequence[AttemptFacts]) -> float:
        return 0.0

    def learn_s(self, batch: Sequence[AttemptFacts]) -> float:
        return self._rng.uniform(0.0, 2 * self._mean_s)

    def send_s(self) -> float:
        return self._rng.choice((0.0, self._mean_s))

    def load_s(self) -> float:
        return self._rng.uniform(0.0, 2.0)

    def save_s(self) -> tuple[float, float]:
        return self._rng.uniform(0.0, 0.5), self._rng.uniform(0.0, 10.0)

    def restart_s(self) -> float:
        return self._rng.uniform(1.0, 10.0)


class _Run:
    """One hunted schedule, while it runs."""

    def __init__(self, schedule: Schedule) -> None:
        draws = Draws(schedule.seed)
        self.config = draw_config(draws.of("config"))
        self.faults = without(faults_of(schedule.seed), schedule.kept)
        self._workload = draw_workload(draws.of("workload"), self.config)
        self._scripts = Scripts(self._workload, draws)
        self._costs = _Costs(draws.of("costs"))
        travel = draws.of("travel")
        slowest_s = travel.choice((0.0, 0.01, 1.0))
        self._travel_s = lambda: travel.uniform(0.0, slowest_s)
        self._speed_rng = draws.of("servers")
        steps = self.config.trainer.steps
        assert steps is not None, "draw_config sets it"
        self._total_steps = steps
        self._rules = LedgerRules.of(
            self.config.buffer, group_size=self.config.rollout.group_size, total_steps=steps
        )
        self.laws = Laws(replace(self._rules, group_size=self.config.attempts_per_group))
        self._occasions = Occasions()
        self._progress = DurableState()
        self._journal = WatchedJournal(self.laws.wrote)
        self._last_step_at = 0.0
        self._driver = trio.CancelScope()
        self._goes_elsewhere = False
        self._process: BufferProcess
        self._fleet: VirtualFleet | None = None
        self._num_drivers = 0
        self.ended_at = 0.0

    # ------------------------------------------------------------------------------------ what the loop tells

    def spent(self, phase: str, seconds: float) -> None:
        return

    def took(self, step: int, batch: Sequence[AttemptFacts]) -> None:
        self.laws.took(step, batch)

    def published(self, version: int, step: int) -> None:
        return

    def stepped(self, step: int) -> None:
        self._last_step_at = trio.current_time()

    def released(self, owner: str) -> None:
        self.laws.released(self._process.buffer, owner)

    # --------------------------------------------------------------------------------------------- the course

    async def main(self) -> None:
        self._process = BufferProcess(
            self._open_buffer, travel_s=self._travel_s, after_call=self.laws.after_call
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._fail)
            nursery.start_soon(self._watch)
            while not await self._drive():
                await self._resume()
            nursery.cancel_scope.cancel()
        self.ended_at = trio.current_time()
        self.laws.finish(self._process.buffer, self._total_steps)

    def _open_buffer(self) -> ReplayBuffer:
        own = self.config.buffer
        return ReplayBuffer(
            Tasks(),
            self._rules,
            FOLDER,
            has_greedy=self.config.has_greedy,
            drop_constant_groups=own.drop_constant_groups,
            lease_timeout_s=own.lease_timeout_s,
            duplicate_after_s=own.duplicate_after_s or math.inf,
            journal=self._journal,
            clock=trio.current_time,
        )

    async def _drive(self) -> bool:
        """Run a driver with its actors and servers; return whether it made all steps."""
        self._num_drivers += 1
        is_complete = False
        with trio.CancelScope() as self._driver:
            async with trio.open_nursery() as nursery:
                self._fleet = VirtualFleet(
                    self.config,
                    nursery,
                    self._process,
                    self._scripts,
                    Turns(self._workload.max_tokens),
                    speeds={f"server-{i}": self._speed() for i in range(self.config.rollout.num_started)},
                    tend_s=5.0,
                    name=f"driver-{self._num_drivers}",
                )
                loop = LearnerLoop(
                    self.config,
                    self._process,
                    self._fleet,
                    self._costs,
                    self._progress,
                    self,
                    total_steps=self._total_steps,
                    fails=self._occasions.happens,
                )
                await loop.run()
                is_complete = True
                nursery.cancel_scope.cancel()
        self._fleet = None
        return is_complete

    def _speed(self) -> ServerSpeed:
        base_s = self._speed_rng.choice((0.01, 0.05, 0.3))
        if self.config.agent.trajectory_timeout_s < _SLOW_TIMEOUT_S:
            base_s = min(base_s, 0.05)  # else no group might ever be complete in time
        return ServerSpeed(
            lambda batch: base_s,
            kv_s=base_s / 1000,
            prefill_s=base_s / 10,
            max_running=self._speed_rng.choice((1, 4, 64)),
            kv_tokens=self._speed_rng.choice((150.0, 1000.0, math.inf)),
        )

    async def _resume(self) -> None:
        """Start the run again after its driver died: the buffer died with it."""
        await trio.sleep(1.0)
        self._progress.stop(trio.current_time())
        checkpoint = self._progress.checkpoint
        if self._goes_elsewhere and checkpoint is not None:
            self._journal = WatchedJournal(self.laws.wrote)
            self.laws.begin_journal()
        self._goes_elsewhere = False
        self._process.restart()
        step, state = (0, None) if checkpoint is None else (checkpoint.step, checkpoint.buffer_state)
        await self._process.run_async(ReplayBuffer.resume, step, state)

    # ---------------------------------------------------------------------------------------- faults and laws

    async def _fail(self) -> None:
        for fault in self.faults:
            await trio.sleep_until(fault.at_s)
            if fault.kind in AT_A_CALL:
                self._occasions.add(AT_A_CALL[fault.kind])
            else:
                await self._happen(fault)

    async def _happen(self, fault: Fault) -> None:
        fleet = self._fleet
        match fault.kind:
            case "buffer dies":
                self._process.restart()
            case "buffer dies before it answers":
                self._process.dies_before_answer = True
            case "disk is full":
                journal = self._journal
                journal.is_full = True
                await trio.sleep(fault.for_s)
                journal.is_full = False
            case "driver dies" | "run continues elsewhere":
                self._goes_elsewhere = fault.kind == "run continues elsewhere"
                self._driver.cancel()
            case "actor dies" if fleet is not None and fleet.actors:
                fleet.kill(fault.index % len(fleet.actors))
            case "server dies" | "server hangs" if fleet is not None:
                engine = list(fleet.engines.values())[fault.index % len(fleet.engines)]
                if fault.kind == "server dies" and not engine.is_dead:
                    engine.die()
                elif not engine.is_dead:
                    engine.hang()
            case _:
                return

    async def _watch(self) -> None:
        while True:
            await trio.sleep(_WATCH_S)
            now = trio.current_time()
            self.laws.watch_leases(self._process.buffer, self._playing, now)
            if now - self._last_step_at > STALL_S:
                raise Violation("stall", f"no step for {STALL_S:g} s: {self._process.buffer.counts()}")

    def _playing(self, owner: str) -> Sequence[int] | None:
        actors = [] if self._fleet is None else self._fleet.actors
        return next(
            (actor.manager.leased_groups for actor in actors if actor.owner == owner and not actor.is_dead),
            None,
        )


def faults_of(seed: int) -> list[Fault]:
    """Return all faults of the schedule with this seed."""
    return draw_faults(Draws(seed).of("faults"), most=_MOST_FAULTS, until_s=_FAULTS_UNTIL_S)


def run_schedule(schedule: Schedule) -> ScheduleResult:
    """Run a schedule and return what it came to."""
    run = _Run(schedule)
    law, what = None, ""
    try:
        run_virtually(run.main, seed=schedule.seed)
    except Exception as error:  # noqa: BLE001 - boundary of one schedule: whatever the code raises is a find
        law, what = _judge(error)
    events = run.laws.events
    return ScheduleResult(
        schedule, tuple(run.faults), len(events), run.laws.fingerprint, run.ended_at, law, what
    )


def _judge(error: Exception) -> tuple[str, str]:
    """Return the law that an exception violates, and what happened."""
    root: BaseException = error
    while isinstance(root, BaseExceptionGroup):
        root = root.exceptions[0]
    if isinstance(root, Violation):
        return root.law, str(root)
    frame = traceback.extract_tb(root.__traceback__)[-1]
    return "crash", f"{type(root).__name__}: {root} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"


def shrink(
    found: ScheduleResult, *, run: Callable[[Schedule], ScheduleResult] = run_schedule
) -> ScheduleResult:
    """Return a failing schedule with as few faults as it needs to violate the same law."""
    kept = [fault.number for fault in found.faults]
    for number in list(kept):
        fewer = [own for own in kept if own != number]
        tried = run(replace(found.schedule, kept=tuple(fewer)))
        if tried.law == found.law:
            kept, found = fewer, tried
    return found


@dataclass(frozen=True, slots=True)
class Line:
    """A line for the user."""

    text: str
    is_violation: bool = False


def hunt_lines(num: int, *, seed: int, kept: tuple[int, ...] | None = None) -> Iterator[Line]:
    """Run `num` schedules from `seed` on, up to the first violation, and yield lines about them.

    Raises:
        ConfigError: `kept` has a fault that the schedule of `seed` has not.
    """
    known = [fault.number for fault in faults_of(seed)]
    if unknown := sorted(set(kept or ()) - set(known)):
        has = f"faults 0 to {known[-1]}" if known else "no faults"
        raise ConfigError(f"--faults {','.join(map(str, unknown))}: the schedule of --seed {seed} has {has}")
    num_events, virtual_s = 0, 0.0
    for count in range(num):
        result = run_schedule(Schedule(seed + count, kept))
        num_events += result.num_events
        virtual_s += result.virtual_s
        if result.law is not None:
            yield Line(f"{result.what}\n  {_named(result)}\n  {result.schedule.command}", is_violation=True)
            if len(result.faults) > 1:
                smaller = shrink(result)
                yield Line(
                    f"with as few faults as it needs:\n  {_named(smaller)}\n  {smaller.schedule.command}"
                )
            return
        if (count + 1) % _REPORT_EVERY == 0 and count + 1 < num:
            yield Line(f"{count + 1:,} schedules, {num_events:,} events, all laws hold")
    if num == 1:
        yield Line(f"seed {seed}: {_named(result)}; fingerprint {result.fingerprint}")
    yield Line(
        f"{num:,} schedules, {num_events:,} events, {virtual_s / 3600:,.1f} virtual hours: all laws hold"
    )


def _named(result: ScheduleResult) -> str:
    return "; ".join(map(str, result.faults)) or "no faults"
