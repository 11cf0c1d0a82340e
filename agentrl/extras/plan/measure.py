"""What a simulation measures: times by phase, shares of idle time, lags, and memory of components."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from agentrl.data.attempt_facts import AttemptFacts
from agentrl.extras.plan.fleet import VirtualFleet


@dataclass(frozen=True)
class Simulated:
    """What a simulation came to; times are means of a step.

    phases: seconds of the learner's loop by phase; `take` is the wait for a batch.
    servers: shares of the time of all servers: sampling, prefill, paused, down, idle.
    running, waiting: requests on a server.
    most_in_flight: largest number of attempts that were played at the same time, in the whole simulation.
    kv_share: largest part of a server's KV cache in use.
    leasing_share: share of the actors' time that they wait because the bound on staleness admits no group.
    lags: share of trained tokens by lag.
    attempts: trajectories of a step; the longest in tokens, and the mean.
    redone_share: prompt tokens that were computed again, per sampled token.
    dropped: groups by reason, of the whole simulation, per group trained on.
    memory_gb: of components, by name.
    """

    step_s: float
    step_p95_s: float
    phases: Mapping[str, float]
    servers: Mapping[str, float]
    running: float
    waiting: float
    most_in_flight: int
    kv_share: float
    leasing_share: float
    lags: Mapping[int, float]
    tokens_per_step: float
    sampled_per_step: float
    mean_tokens: float
    longest_tokens: float
    redone_share: float
    dropped: Mapping[str, float]
    num_failures: int
    memory_gb: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens that were trained on, per second."""
        return self.sampled_per_step / self.step_s

    @property
    def learner_idle_share(self) -> float:
        return self.phases.get("take", 0.0) / self.step_s


class StepMeter:
    """Measures the steps of a loop after the first `warmup`: `agentrl.extras.plan.loop.Watch`.

    on_step: called after each step.
    """

    def __init__(self, *, warmup: int, grain: int, on_step: Callable[[], None]) -> None:
        self._warmup = warmup
        self._on_step = on_step
        self._grain = grain
        self._version = -1
        self._ends: list[float] = []
        self._step_phases: list[dict[str, float]] = [defaultdict(float)]
        self._batches: list[tuple[int, int, int, int]] = []  # tokens, sampled tokens, longest, attempts
        self._lags: list[Counter[int]] = []
        self._begin: Mapping[str, float] = {}
        self._end: Mapping[str, float] = {}
        self.fleet: VirtualFleet | None = None
        self.read_waits = lambda: 0.0

    # ------------------------------------------------------------------------------- what the loop tells

    def spent(self, phase: str, seconds: float) -> None:
        self._step_phases[-1][phase] += seconds

    def took(self, step: int, batch: Sequence[AttemptFacts]) -> None:
        lags: Counter[int] = Counter()
        for attempt in batch:
            for version, count in attempt.versions:
                lags[self._version - version] += count
        sizes = [attempt.num_tokens for attempt in batch]
        sampled = sum(attempt.num_action_tokens for attempt in batch)
        self._lags.append(lags)
        self._batches.append((sum(sizes), sampled, max(sizes), len(sizes)))

    def published(self, version: int, step: int) -> None:
        self._version = version
        if step == 0:
            self._ends = [trio.current_time()]

    def stepped(self, step: int) -> None:
        self._on_step()
        self._ends.append(trio.current_time())
        self._step_phases.append(defaultdict(float))
        if len(self._ends) - 1 == self._warmup:
            self._begin = self._counters()
        self._end = self._counters()

    def released(self, owner: str) -> None:
        return

    # ----------------------------------------------------------------------------------------- the result

    def _counters(self) -> dict[str, float]:
        assert self.fleet is not None, "it is set before the loop begins"
        total: dict[str, float] = defaultdict(float)
        for engine in self.fleet.engines.values():
            for name, value in engine.counters().items():
                total[name] += value
        for actor in self.fleet.actors:
            total["redone"] += actor.router.work.redone_tokens
            total["sampled"] += actor.router.work.sampled_tokens
        total["lease_wait_s"] = self.read_waits()
        return total

    def result(self, *, dropped: Mapping[str, int], num_failures: int, most_in_flight: int) -> Simulated:
        """Return what was measured."""
        assert self.fleet is not None, "it is set before the loop begins"
        begin, ends = self._warmup, self._ends
        if not begin:
            self._begin = dict.fromkeys(self._end, 0.0)
        times = [after - before for before, after in zip(ends[begin:-1], ends[begin + 1 :], strict=True)]
        wall_s, num = sum(times), len(times)
        phases: dict[str, float] = defaultdict(float)
        for own in self._step_phases[begin : begin + num]:
            for name, seconds in own.items():
                phases[name] += seconds / num
        spent = {name: self._end[name] - self._begin.get(name, 0.0) for name in self._end}
        engines, actors = len(self.fleet.engines), max(1, len(self.fleet.actors))
        of_servers = wall_s * engines
        servers = {
            "sampling": (spent["busy_s"] - spent["prefill_s"]) / of_servers,
            "prefill": spent["prefill_s"] / of_servers,
            "paused": spent["paused_s"] / of_servers,
            "down": spent["down_s"] / of_servers,
        }
        servers["idle"] = 1.0 - sum(servers.values())
        batches = self._batches[begin : begin + num]
        lags: Counter[int] = Counter()
        for own_lags in self._lags[begin : begin + num]:
            lags += own_lags
        num_trained = max(1, len(self._batches))
        attempts = sum(batch[3] for batch in batches)
        grain = self._grain
        return Simulated(
            step_s=wall_s / num,
            step_p95_s=sorted(times)[math.ceil(0.95 * num) - 1],
            phases=dict(phases),
            servers=servers,
            running=spent["running_s"] / of_servers,
            waiting=spent["waiting_s"] / of_servers,
            most_in_flight=most_in_flight,
            kv_share=max(engine.peak_kv_share for engine in self.fleet.engines.values()),
            leasing_share=spent["lease_wait_s"] / (wall_s * actors),
            lags={lag: count / lags.total() for lag, count in sorted(lags.items())},
            tokens_per_step=grain * statistics.mean(batch[0] for batch in batches),
            sampled_per_step=grain * statistics.mean(batch[1] for batch in batches),
            mean_tokens=grain * sum(batch[0] for batch in batches) / attempts,
            longest_tokens=grain * max(batch[2] for batch in batches),
            redone_share=spent["redone"] / max(1.0, spent["sampled"]),
            dropped={reason: count / num_trained for reason, count in dropped.items() if count},
            num_failures=num_failures,
        )
