"""`agentrl train` with maximum lag: batches are taken only when the buffer is as full as the bound allows.

    python benchmarks/train_behind.py CONFIG KEY=VALUE ...

Otherwise the lag depends on the relative speed of servers and learner, and differs between machines. Here,
once there are `buffer.max_staleness` versions, every batch is trained on that many versions after it was
leased.
"""

from __future__ import annotations

import sys
import time

from agentrl.config.compose import load_config
from agentrl.config.schema import Config
from agentrl.controller.run import Run
from agentrl.controller.start import open_run
from agentrl.controller.train import train_step

POLL_S = 0.02


def train_behind(config: Config) -> None:
    """Train and validate as `agentrl train` does, with the oldest tokens that the config allows."""
    with open_run(config) as run:
        run.publish()
        run.start_rollouts()
        run.validate()
        while run.step < run.total_steps:
            wait_until_ahead(run, config)
            train_step(run, config)
            if run.step % config.trainer.test_freq == 0 or run.step == run.total_steps:
                run.validate()
        run.finish()


def wait_until_ahead(run: Run, config: Config) -> None:
    """Wait until the finished groups suffice for `max_staleness` further steps, or for the rest of the
    run."""
    steps_ahead = min(config.buffer.max_staleness, run.total_steps - run.step)
    deadline = time.monotonic() + config.buffer.stall_timeout_s
    while run.counts().ready < steps_ahead * config.buffer.groups_per_step:
        run.heal()
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{run.counts()} after {config.buffer.stall_timeout_s:g} s; the servers do not get "
                f"{steps_ahead} steps ahead"
            )
        time.sleep(POLL_S)


if __name__ == "__main__":
    train_behind(load_config(sys.argv[1], sys.argv[2:]))
