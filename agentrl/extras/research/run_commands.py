"""`agentrl audit` and `replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.interrupted import resumable
from agentrl.cli.options import Debug, Overrides


def audit(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a training run, which may still be running.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, including the groups of each task.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Prove what became of every group: follow the run's journal, and compare it with what else the run
    wrote. Ends with 1 if it fails.
    """
    from agentrl.extras.research.audit import audit_run

    found = audit_run(folder)
    typer.echo(found.to_json() if as_json else "\n".join(found.lines()))
    raise typer.Exit(0 if found.audit.is_balanced else 1)


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
        bool, typer.Option("--report", help="Compare corrections at every step (agentrl docs research).")
    ] = False,
    debug: Debug = False,
) -> None:
    """Train the learner alone from stored trajectories: deterministic, without servers and rollouts."""
    with resumable():
        from agentrl.extras.research.replay import load_replay_config
        from agentrl.extras.research.replay import replay as run

        run(
            folder,
            load_replay_config(folder, overrides or [], file=config, out=out),
            last_step=last_step,
            report=report,
        )
