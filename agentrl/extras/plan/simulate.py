"""`simulate`: runs a config on the virtual clock and returns what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import trio

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.config.schema import Config
from agentrl.config.simulation import DistributionConfig
from agentrl.errors import ConfigError
from agentrl.extras.plan.clock import run_virtually
from agentrl.extras.plan.draws import Draws
from agentrl.extras.plan.fleet import FOLDER, VirtualFleet
from agentrl.extras.plan.hunt import Tasks
from agentrl.extras.plan.loop import DurableState, LearnerLoop
from agentrl.extras.plan.measure import Simulated, StepMeter
from agentrl.extras.plan.patience import MOST_TRIES, Patience
from agentrl.extras.plan.process import BufferProcess
from agentrl.extras.plan.speeds import Costs, find_size, server_speed
from agentrl.extras.plan.turns import Turns
from agentrl.extras.plan.workload import Drawn, Scripts, ScriptSource, Workload

TEND_S = 5.0
"""Interval of the routers' checks of servers: longer than in a run, where each costs nothing."""
_GRAINS = 100
"""Simulated tokens of a mean attempt, if `simulation.grain_tokens` does not say otherwise."""
_TRAVEL_S = 0.001
_MOST_ATTEMPTS = 10_000_000
"""Attempts that one simulation may play: half a day of CPU."""
_MOST_TOKENS = 1_000_000
"""Simulated tokens of a mean attempt: its prompts are lists."""
_MOST_PROCESSES = 20_000
"""Servers, or rollout actors, of one simulation."""


def simulate(config: Config, *, scripts: ScriptSource | None = None) -> Simulated:
    """Simulate a training with this config. `scripts`: what attempts do; None: as the config draws it.

    Raises:
        ConfigError: the size of the model is not known, or it does not fit on its servers; the run is too
            large to be simulated, or makes no steps.
    """
    run = _Simulation(config, scripts)
    return run_virtually(run.main, seed=config.trainer.seed)


class _Simulation:
    """A simulation while it runs."""

    def __init__(self, config: Config, scripts: ScriptSource | None) -> None:
        own = config.simulation
        warmup = config.buffer.max_staleness + 2 if own.warmup is None else own.warmup
        self._num_steps = warmup + own.steps
        self._config = config.model_copy(
            update={"trainer": config.trainer.model_copy(update={"steps": self._num_steps})}
        )
        self._draws = Draws(config.trainer.seed)
        size = find_size(config)
        self._grain = own.grain_tokens or max(1, round(mean_attempt(config) / _GRAINS))
        _refuse_too_large(config, warmup, self._grain)
        self._costs = Costs(config, size, self._grain)
        self._speed = server_speed(config, size, grain=self._grain)
        batch = config.buffer.groups_per_step * config.attempts_per_group
        self._patience = Patience(
            scripts or Scripts(workload_of(config, self._grain), self._draws), most=MOST_TRIES * batch
        )
        limit = max(2, math.ceil(config.agent.max_response_tokens / self._grain) + 1)
        self._turns = Turns(limit)
        self._meter = StepMeter(warmup=warmup, grain=self._grain, on_step=self._patience.stepped)
        self._num_failures = 0

    async def main(self) -> Simulated:
        own, config = self._config.buffer, self._config
        # A step more than the bound admits, so that no measured step lacks groups to play next.
        rules = LedgerRules.of(
            own,
            group_size=config.rollout.group_size,
            total_steps=self._num_steps + math.ceil(own.oversample * (own.max_staleness + 1)) + 1,
        )
        buffer = ReplayBuffer(
            Tasks(),
            rules,
            FOLDER,
            has_greedy=config.has_greedy,
            drop_constant_groups=own.drop_constant_groups,
            lease_timeout_s=own.lease_timeout_s,
            duplicate_after_s=own.duplicate_after_s or math.inf,
            journal=Journal(None),
            clock=trio.current_time,
        )
        process = BufferProcess(lambda: buffer, travel_s=lambda: _TRAVEL_S)
        with self._patience.scope:
            async with trio.open_nursery() as nursery:
                fleet = self._meter.fleet = VirtualFleet(
                    config,
                    nursery,
                    process,
                    self._patience,
                    self._turns,
                    speeds={f"server-{i}": self._speed for i in range(max(1, config.rollout.num_started))},
                    tend_s=TEND_S,
                    name="actor",
                )
                self._meter.read_waits = lambda: process.waited_s["lease"]
                loop = LearnerLoop(
                    config,
                    process,
                    fleet,
                    self._costs,
                    DurableState(),
                    self._meter,
                    total_steps=self._num_steps,
                )
                self._start_failures(nursery, fleet)
                await loop.run()
                nursery.cancel_scope.cancel()
        counts = buffer.counts()
        if loop.step < self._num_steps:
            raise ConfigError(self._patience.reason(loop.step + 1, fleet.actors, counts.dropped))
        assert counts.is_balanced, counts
        return self._meter.result(
            dropped=counts.dropped, num_failures=self._num_failures, most_in_flight=self._turns.most
        )

    def _start_failures(self, nursery: trio.Nursery, fleet: VirtualFleet) -> None:
        own = self._config.simulation
        if own.server_mtbf_h is not None:
            for index, engine in enumerate(fleet.engines.values()):
                kill = engine.die
                nursery.start_soon(self._fail, f"server {index}", own.server_mtbf_h, kill)
        if own.actor_mtbf_h is not None:
            for index in range(self._config.rollout.num_actors):
                nursery.start_soon(self._fail, f"actor {index}", own.actor_mtbf_h, partial(fleet.kill, index))

    async def _fail(self, name: str, mtbf_h: float, kill: Callable[[], None]) -> None:
        rng = self._draws.of("failures", name)
        while True:
            await trio.sleep(rng.expovariate(1 / (3600 * mtbf_h)))
            kill()
            self._num_failures += 1


def _refuse_too_large(config: Config, warmup: int, grain: int) -> None:
    """Raise ConfigError if a simulation would take days or too much memory: nothing of it is shortened."""
    own, rollout = config.simulation, config.rollout
    attempts = (warmup + own.steps) * config.buffer.groups_per_step * config.attempts_per_group
    if attempts > _MOST_ATTEMPTS:
        raise ConfigError(
            f"simulation.steps={own.steps:,} after {warmup:,} of warm-up would play {attempts:,} attempts, "
            f"each for milliseconds; simulate at most {_MOST_ATTEMPTS:,}: fewer steps or groups"
        )
    if (tokens := mean_attempt(config)) > _MOST_TOKENS * grain:
        raise ConfigError(
            f"simulation.grain_tokens={grain:,} makes {tokens / grain:,.0f} simulated tokens of a mean "
            f"attempt; simulate at most {_MOST_TOKENS:,}: a larger grain, or null"
        )
    for key, num in (("num_servers", rollout.num_started), ("num_actors", rollout.num_actors)):
        if num > _MOST_PROCESSES:
            raise ConfigError(f"rollout.{key}={num:,}: simulate at most {_MOST_PROCESSES:,}")


def mean_attempt(config: Config) -> float:
    """Return about how many tokens an attempt has."""
    own = config.simulation
    turns = _mean(own.turns)
    tokens = turns * _mean(own.turn_tokens) + (turns - 1) * _mean(own.tool_tokens)
    return min(tokens, config.agent.max_response_tokens) + _mean(own.prompt_tokens)


def _mean(own: DistributionConfig) -> float:
    return sum(own.values) / len(own.values) if own.kind == "samples" else own.mean


def workload_of(config: Config, grain: int) -> Workload:
    """Return the distribution of attempts that a config describes, in tokens of so many real ones."""
    own = config.simulation
    return Workload(
        turns=_drawn(own.turns),
        turn_tokens=_drawn(own.turn_tokens),
        prompt_tokens=_drawn(own.prompt_tokens),
        tool_s=_drawn(own.tool_s),
        tool_tokens=_drawn(own.tool_tokens),
        max_tokens=config.agent.max_response_tokens,
        grain=grain,
        tool_hang=own.tool_hang,
        tool_failure=own.tool_failure,
        pass_rate=own.pass_rate,
    )


def _drawn(own: DistributionConfig) -> Drawn:
    most = math.inf if own.most is None else own.most
    return Drawn(own.kind, own.mean, own.sigma, most, own.group_share, sorted(own.values))
