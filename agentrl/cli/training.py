"""`agentrl train`, `sft`, `rm` and `replay`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import agentrl
from agentrl.cli.options import ConfigFile, Debug, Overrides
from agentrl.config.storage_urls import shown_path
from agentrl.interrupts import (
    INTERRUPTED_STATUS,
    end_at_once,
    ending_at_the_second_interrupt,
    interruptible,
)


def train(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a policy.

    Starts Ray, inference servers, rollout actors and learner ranks on this machine (or on the cluster of
    `cluster.address`), trains for `trainer.steps` batches and leaves everything in the run folder. Run the
    same command again to resume.

    Everyone sets model.path, data.train_files, agent.tools, rollout.group_size, buffer.groups_per_step and
    trainer.steps. Every key is documented in docs/config.md; `agentrl config explain CONFIG.yaml` shows what
    a config amounts to.
    """
    with _resumable():
        from agentrl.config.compose import load_config

        agentrl.train(load_config(config, overrides or []))


def sft(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a policy by imitation (supervised fine-tuning), from `model.path` or from scratch."""
    with _resumable():
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
    with _resumable():
        from agentrl.config.compose import load_rm_config

        checked = load_rm_config(config, overrides or [])
        from agentrl.offline.supervised import train_reward_model

        train_reward_model(checked)
    model = shown_path(checked.trainer.output)
    typer.echo(f"the model is in {model}; next: agentrl train CONFIG.yaml reward_model.model.path={model}")


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run, or its folder of step_000001.parquet, ...")
    ],
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG.yaml", help="Config to use instead of the run's config.yaml."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the replay; default: `replay` in DIR.")] = None,
    last_step: Annotated[
        int | None,
        typer.Option(min=1, help="Stop after this step; the same command without this option continues."),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="Compare corrections at every step (docs/replay.md).")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train the learner alone from stored trajectories: deterministic, without servers and rollouts."""
    with _resumable():
        from agentrl.offline.replay import load_replay_config
        from agentrl.offline.replay import replay as run

        run(
            folder,
            load_replay_config(folder, overrides or [], file=config, out=out),
            last_step=last_step,
            report=report,
        )


@contextmanager
def _resumable() -> Iterator[None]:
    """On Ctrl-C or SIGTERM, at any moment, print that the run can be resumed and exit with 130."""
    with interruptible():
        try:
            with ending_at_the_second_interrupt():
                yield
        except KeyboardInterrupt:
            sys.stdout.flush()
            # All is closed. What Python would do yet can crash in Ray's destructors, or be interrupted.
            end_at_once(
                "interrupted; everything saved so far is kept, and the same command resumes",
                status=INTERRUPTED_STATUS,
            )
