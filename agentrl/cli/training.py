"""`agentrl train`."""

from __future__ import annotations

import agentrl
from agentrl.cli.interrupted import resumable
from agentrl.cli.options import ConfigFile, Debug, Overrides


def train(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a policy.

    Starts Ray, inference servers, rollout actors and learner ranks on this machine (or on the cluster of
    `cluster.address`), trains for `trainer.steps` batches and leaves everything in the run folder. Run the
    same command again to resume.

    Everyone sets model.path, data.train_files, agent.tools, rollout.group_size, buffer.groups_per_step and
    trainer.steps. Every key is documented in docs/config.md; `agentrl config explain CONFIG.yaml` shows what
    a config amounts to.
    """
    with resumable():
        from agentrl.config.compose import load_config

        agentrl.train(load_config(config, overrides or []))
