"""`agentrl sft` and `agentrl rm`."""

from __future__ import annotations

import typer

from agentrl.cli.interrupted import resumable
from agentrl.cli.options import ConfigFile, Debug, Overrides
from agentrl.config.storage_urls import shown_path


def sft(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a policy by imitation (supervised fine-tuning), from `model.path` or from scratch."""
    with resumable():
        from agentrl.extras.supervised.config import load_sft_config

        checked = load_sft_config(config, overrides or [])
        from agentrl.extras.supervised.train import supervise

        supervise(checked)
    model = shown_path(checked.trainer.output)
    typer.echo(f"the policy is in {model}; next: agentrl train CONFIG.yaml model.path={model}")


def rm(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a reward model on pairs of answers of which one was preferred, from `model.path` or from
    scratch.
    """
    with resumable():
        from agentrl.extras.supervised.config import load_rm_config

        checked = load_rm_config(config, overrides or [])
        from agentrl.extras.supervised.train import train_reward_model

        train_reward_model(checked)
    model = shown_path(checked.trainer.output)
    typer.echo(f"the model is in {model}; next: agentrl train CONFIG.yaml reward_model.model.path={model}")
