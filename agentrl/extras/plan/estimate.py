"""Step time of a split by arithmetic, with the simulator's own rates: a thousand splits in a second.

A step lasts as long as the slowest of three: the learner, with the publish; the servers, which have so many
attempts in flight as the bound on staleness admits; and the longest attempt, for which a batch waits when it
is `max_staleness + 1` steps old. Without staleness they follow each other. Queues, and servers that are idle
while others are not, are left to the simulation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from agentrl.config.model_size import ModelSize
from agentrl.config.schema import Config
from agentrl.extras.plan.draws import Draws
from agentrl.extras.plan.engine import ServerSpeed
from agentrl.extras.plan.simulate import workload_of
from agentrl.extras.plan.speeds import Costs, find_size, server_speed
from agentrl.extras.plan.workload import Script, Scripts

LONGEST = "the longest attempt"
_DRAWN = 512
"""Attempts from which the workload's means are taken."""
_ROUNDS = 30
_ADMITTED = 0.98
"""Share of the KV cache that servers fill, as the simulated ones do."""
_PARTS = 16


@dataclass(frozen=True)
class Demand:
    """What the attempts of a step need, from a sample of them.

    sampled, totals: tokens of each, without and with prompts and outputs of tools.
    prefilled: prompt tokens per attempt that a server computes.
    tools: seconds of each in tools.
    num: attempts of a step.
    """

    sampled: Sequence[int]
    totals: Sequence[int]
    prefilled: float
    tools: Sequence[float]
    num: int

    @classmethod
    def of(cls, config: Config) -> Demand:
        """Draw the workload of a config; the longest of the sample stands for that of a step."""
        size = config.rollout.group_size
        drawn = Scripts(workload_of(config, 1), Draws(config.trainer.seed))
        num = config.buffer.groups_per_step * config.attempts_per_group
        scripts = [drawn.next(index // size, index % size) for index in range(min(num, _DRAWN))]
        timeout = config.agent.tool_timeout_s
        return cls(
            sampled=[sum(turn.tokens for turn in own.turns) for own in scripts],
            totals=[_total(own) for own in scripts],
            prefilled=statistics.mean(_computed(own, size) for own in scripts),
            tools=[sum(min(timeout, turn.tool_s) for turn in own.turns) for own in scripts],
            num=num,
        )

    @cached_property
    def mean_sampled(self) -> float:
        return statistics.mean(self.sampled)

    @cached_property
    def mean_tools_s(self) -> float:
        return statistics.mean(self.tools)

    @cached_property
    def mean_context(self) -> float:
        """Tokens in the KV cache of an attempt, over the time that it samples."""
        weights = sum(self.sampled)
        pairs = zip(self.sampled, self.totals, strict=True)
        return sum(own * (total - own / 2) for own, total in pairs) / weights

    @cached_property
    def _extremes(self) -> list[tuple[int, float]]:
        """Tokens and seconds in tools of the attempts that may be the longest, at some speed."""
        found: list[tuple[int, float]] = []
        for own, tool in sorted(zip(self.sampled, self.tools, strict=True), reverse=True):
            if not found or tool > found[-1][1]:
                found.append((own, tool))
        return found

    def longest_s(self, tick_s: float) -> float:
        """Return the seconds of the longest attempt, at so many seconds per token."""
        return max(own * tick_s + tool for own, tool in self._extremes)


def _total(script: Script) -> int:
    return script.prompt_tokens + sum(turn.tokens + turn.tool_tokens for turn in script.turns)


def _computed(script: Script, group_size: int) -> float:
    """Return the prompt tokens that a server computes; the members of a group share their first prompt."""
    return script.prompt_tokens / group_size + sum(turn.tool_tokens for turn in script.turns)


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """Seconds of a step by what they are; `step_s` follows from them.

    learner_s: of the learner's loop: updates, driver, publish.
    servers_s: in which the servers sample a batch.
    longest_s: of the longest attempt, over the steps that it may last.
    """

    learner_s: float
    servers_s: float
    longest_s: float
    max_staleness: int

    @property
    def step_s(self) -> float:
        if self.max_staleness == 0:
            return self.learner_s + max(self.servers_s, self.longest_s)
        return max(self.learner_s, self.servers_s, self.longest_s)

    @property
    def limit(self) -> str:
        """What the step waits for."""
        if self.max_staleness == 0:
            return "the servers and the learner wait for each other"
        names = ("the learner", "the servers", LONGEST)
        return max(zip((self.learner_s, self.servers_s, self.longest_s), names, strict=True))[1]


def estimate_of(config: Config) -> StepEstimate:
    """Return the times of a step of a config as it is.

    Raises:
        ConfigError: the size of the model is not known.
    """
    return StepEstimator(config, find_size(config)).estimate(
        ranks=config.learner.world_size,
        servers=max(1, config.rollout.num_started),
        tp=config.simulation.server.gpus,
        max_staleness=config.buffer.max_staleness,
    )


class StepEstimator:
    """Estimates steps of a config with other numbers of ranks and servers."""

    def __init__(self, config: Config, size: ModelSize | None) -> None:
        """`size` None: both sides are paced."""
        self._config = config
        self._size = size
        self._demand = Demand.of(config)
        self._load_s = Costs(config, size, 1).load_s()
        scale = self._demand.num / len(self._demand.totals)
        self._one_rank_s = {lag: scale * self._update_s(lag) for lag in (0, 1)}
        own = config.simulation.learner
        self._driver_s = scale * sum(self._demand.totals) * own.driver_us_per_token * 1e-6
        self._speeds: dict[int, ServerSpeed] = {}
        self._serving: dict[tuple[int, int, int], tuple[float, float]] = {}

    def _update_s(self, max_staleness: int) -> float:
        """Return the seconds in which one rank learns from the sample; with staleness it scores, too."""
        config = self._config
        buffer = config.buffer.model_copy(update={"max_staleness": max_staleness})
        costs = Costs(config.model_copy(update={"buffer": buffer}), self._size, 1)
        sampled = sum(self._demand.sampled)
        return config.learner.world_size * costs.update_s(list(self._demand.totals), sampled)

    def estimate(self, *, ranks: int, servers: int, tp: int, max_staleness: int) -> StepEstimate:
        """Return the times of a step. `tp`: GPUs of a server."""
        learner_s = self._one_rank_s[min(1, max_staleness)] / ranks + self._driver_s + self._load_s
        speed = self._speed(tp)
        if max_staleness == 0:
            return StepEstimate(learner_s, self._cached_drain_s(tp, servers), 0.0, 0)
        key = (servers, tp, max_staleness)
        if key not in self._serving:
            self._serving[key] = self._serving_s(*key)
        servers_s, most = self._serving[key]
        longest_s = self._longest_s(speed, servers, max(learner_s, servers_s), most, max_staleness + 1)
        return StepEstimate(learner_s, servers_s, longest_s, max_staleness)

    def _longest_s(
        self, speed: ServerSpeed, servers: int, others_s: float, most: float, num_steps: int
    ) -> float:
        """Return the seconds of the longest attempt per step, at the load that the step leaves on servers.

        others_s: of a step for all else. most: requests that run on a server at most.
        """
        low, high = 0.0, most
        for _ in range(_ROUNDS // 2):  # a longer step leaves fewer requests running, which are faster
            running = (low + high) / 2
            tick_s = self._tick_s(speed, running)
            step_s = max(others_s, self._demand.longest_s(tick_s) / num_steps)
            wanted = self._demand.num / servers * self._demand.mean_sampled * tick_s / step_s
            low, high = (running, high) if wanted > running else (low, running)
        return self._demand.longest_s(self._tick_s(speed, high)) / num_steps

    def _cached_drain_s(self, tp: int, servers: int) -> float:
        key = (servers, tp, 0)
        if key not in self._serving:
            self._serving[key] = (self._drain_s(self._speed(tp), servers), 0.0)
        return self._serving[key][0]

    def _serving_s(self, servers: int, tp: int, max_staleness: int) -> tuple[float, float]:
        """Return the seconds of the servers, and how many requests run on each then."""
        speed = self._speed(tp)
        # On average half a batch is complete and waits for the rest of it.
        in_flight = (max_staleness + 0.5) * self._demand.num
        running = self._running(speed, in_flight / servers)
        tick_s = self._tick_s(speed, running)
        per_attempt_s = (
            tick_s * self._demand.mean_sampled / running + speed.prefill_s * self._demand.prefilled
        )
        servers_s = self._demand.num / servers * per_attempt_s + self._load_s
        return servers_s, running

    def _speed(self, tp: int) -> ServerSpeed:
        if tp not in self._speeds:
            own = self._config.simulation
            server = own.server.model_copy(update={"gpus": tp})
            changed = own.model_copy(update={"server": server})
            config = self._config.model_copy(update={"simulation": changed})
            self._speeds[tp] = server_speed(config, self._size, grain=1)
        return self._speeds[tp]

    def _slots(self, speed: ServerSpeed) -> float:
        return max(1.0, min(speed.max_running, _ADMITTED * speed.kv_tokens / self._demand.mean_context))

    def _running(self, speed: ServerSpeed, in_flight: float) -> float:
        """Return the requests that run on a server, of so many attempts, some of which are in tools."""
        slots, tools_s = self._slots(speed), self._demand.mean_tools_s
        low, high = 0.0, min(slots, in_flight)
        for _ in range(_ROUNDS):  # fewer attempts are in tools when sampling takes longer
            running = (low + high) / 2
            samples_s = self._demand.mean_sampled * self._tick_s(speed, running)
            wanted = in_flight * samples_s / (samples_s + tools_s)
            low, high = (running, high) if wanted > running else (low, running)
        return max(1e-9, high)

    def _tick_s(self, speed: ServerSpeed, running: float) -> float:
        batch = max(1, math.ceil(running))
        return speed.base_s(batch) + speed.kv_s * self._demand.mean_context * running

    def _drain_s(self, speed: ServerSpeed, servers: int) -> float:
        """Return the seconds in which servers sample one batch that they all begin at the same time."""
        begun = self._demand.num / servers
        waves = max(1.0, begun / self._slots(speed))
        lengths = sorted(self._demand.sampled)
        seconds, before = speed.prefill_s * self._demand.prefilled * begun, 0
        for part in range(1, _PARTS + 1):
            length = lengths[part * len(lengths) // _PARTS - 1]
            running = max(1.0, begun / waves * (1 - (part - 1) / _PARTS))
            seconds += waves * (length - before) * self._tick_s(speed, running)
            before = length
        return seconds + self._demand.mean_tools_s
