"""A smaller simulation of a large run: fewer groups on fewer servers, with a learner as much slower."""

from __future__ import annotations

import math
from dataclasses import replace

from agentrl.config.schema import Config
from agentrl.extras.plan.measure import Simulated

MOST_ATTEMPTS = 256
"""Attempts of a step in a smaller simulation."""


def scaled(config: Config) -> tuple[Config, float]:
    """Return the config of a smaller simulation with the same step time, and how many times smaller it is.

    Every server has as many attempts as before, but for rounding. The longest attempt of a batch is drawn
    from fewer. A run with one server is as large as it is.
    """
    groups, servers = _sizes(config)
    factor = config.buffer.groups_per_step / groups
    if factor == 1:
        return config, 1.0
    rollout, own = config.rollout, config.simulation
    learner = own.learner.model_copy(
        update={
            # Beyond the schema's bounds: nothing but the simulation reads them.
            "mfu": own.learner.mfu / factor,
            "driver_us_per_token": own.learner.driver_us_per_token * factor,
        }
    )
    in_flight = rollout.num_actors * rollout.max_concurrent_trajectories / factor
    smaller = {"num_servers": servers, "num_actors": 1, "max_concurrent_trajectories": math.ceil(in_flight)}
    return config.model_copy(
        update={
            "buffer": config.buffer.model_copy(update={"groups_per_step": groups}),
            "rollout": rollout.model_copy(update=smaller),
            "simulation": own.model_copy(update={"learner": learner}),
        }
    ), factor


def whole(found: Simulated, factor: float) -> Simulated:
    """Return the figures of the run itself from those of a simulation that is `factor` times smaller."""
    return replace(
        found,
        tokens_per_step=factor * found.tokens_per_step,
        sampled_per_step=factor * found.sampled_per_step,
        most_in_flight=round(factor * found.most_in_flight),
    )


def _sizes(config: Config) -> tuple[int, int]:
    """Return groups and servers in nearly the same proportion as the run's, with few enough attempts."""
    groups, servers = config.buffer.groups_per_step, max(1, config.rollout.num_started)
    most = max(1, MOST_ATTEMPTS // config.attempts_per_group)
    if groups <= most or config.simulation.learner.tokens_per_s is not None:
        return groups, servers
    candidates = [(round(groups * own / servers), own) for own in range(1, servers + 1)]
    small = [pair for pair in candidates if pair[0] <= most] or candidates[:1]
    small = [pair for pair in small if 2 * pair[0] > small[-1][0]]
    return min(small, key=lambda pair: abs(pair[0] * servers / (pair[1] * groups) - 1))
