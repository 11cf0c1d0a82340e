"""`agentrl train`, `sft`, `rm` and `replay`."""

from __future__ import annotations

import typer

import agentrl
from agentrl.cli.interrupted import resumable
from agentrl.cli.options import ConfigFile, Debug, Overrides
from agentrl.config.storage_urls import shown_path


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


def sft(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a policy by imitation (supervised fine-tuning), from `model.path` or from scratch."""
    with resumable():
        from agentrl.config.compose import load_sft_config

        checked = load_sft_config(config, overrides or [])
        from agentrl.offline.supervised import supervise

        supervise(checked)
    model = shown_path(checked.trainer.output)
    typer.echo(f"the policy is in {model}; next: agentrl train CONFIG.yaml model.path={model}")


def rm(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a reward model on pairs of answers of which one was preferred, from `model.path` or from
    scratch.
    """
    with resumable():
        from agentrl.config.compose import load_rm_config

        checked = load_rm_config(config, overrides or [])
        from agentrl.offline.supervised import train_reward_model

        train_reward_model(checked)
    model = shown_path(checked.trainer.output)
    typer.echo(f"the model is in {model}; next: agentrl train CONFIG.yaml reward_model.model.path={model}")
