"""The simulator's prediction of a run against paced servers: the same scripts, in virtual time."""

from __future__ import annotations

import numpy as np
from paced_server import Script, Words, Workload

from agentrl.config.schema import Config
from agentrl.config.simulation import SimulatedLearnerConfig, SimulatedServerConfig, SimulationConfig
from agentrl.extras.plan import workload as simulated
from agentrl.extras.plan.measure import Simulated
from agentrl.extras.plan.simulate import simulate

PUBLISH_S = 0.3
"""Seconds of a step beside batch and learner, as runs on two cores had (docs/results/sync_vs_async.json)."""
PROMPT_TOKENS = 40
TOOL_TOKENS = 12


class PacedScripts:
    """The k-th attempt has the k-th script of a paced server: `agentrl.extras.plan.workload.ScriptSource`."""

    def __init__(self, workload: Workload, words: Words) -> None:
        self._workload = workload
        self._words = words
        self._rng = np.random.default_rng(workload.seed)

    def next(self, group_id: int, member: int) -> simulated.Script:
        script = Script(self._workload, self._rng)
        turns = []
        while not script.is_over:
            latency = script.latency
            num_tokens = len(script.turn(self._words))
            script.take(num_tokens)
            turns.append(simulated.TurnScript(num_tokens, latency or 0.0, TOOL_TOKENS))
        return simulated.Script(PROMPT_TOKENS, tuple(turns), reward=1.0)


def predict(
    config: Config, workload: Workload, words: Words, *, resources: int, warmup: int, steps: int
) -> Simulated:
    """Simulate `warmup + steps` steps of a run with `resources` times the workload's slots and learner."""
    slots = workload.slots * resources
    assumed = SimulationConfig(
        steps=steps,
        warmup=warmup,
        grain_tokens=1,
        publish_s=PUBLISH_S,
        server=SimulatedServerConfig(seconds_per_token=workload.seconds_per_token, max_running=slots),
        learner=SimulatedLearnerConfig(
            tokens_per_s=slots / workload.seconds_per_token, driver_us_per_token=0.0
        ),
    )
    return simulate(config.model_copy(update={"simulation": assumed}), scripts=PacedScripts(workload, words))
