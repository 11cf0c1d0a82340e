"""`agentrl doctor`: exercises what a run needs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Debug, Overrides

if TYPE_CHECKING:
    from agentrl.extras.doctor.checks import Check
    from agentrl.extras.doctor.diagnosis import Diagnosis

_COLOURS = {"ok": typer.colors.GREEN, "slow": typer.colors.YELLOW, "wrong": typer.colors.RED}


def doctor(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG.yaml]",
            help="Config of the run that is to work here; default: only what every run needs.",
        ),
    ] = None,
    overrides: Overrides = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Examine every node of the Ray cluster (cluster.address, or the one that runs here), and "
            "compare the nodes.",
        ),
    ] = False,
    only: Annotated[
        str,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Only these checks: python, processor, gpus, memory, limits, disks, clock, network, "
            "sandbox, ray, trackers, template, servers, frozen, publish.",
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: is_well, seconds, diagnoses with figures.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Exercise what a run needs on this machine: each part is ok, slow or wrong, with the cure.

    It computes, writes, locks, starts Ray and servers, and takes less than a minute. Exit code 1: something
    is wrong.
    """
    from agentrl.config.compose import load_config
    from agentrl.config.schema import Config
    from agentrl.extras.doctor.checks import CHECKS, choose_checks
    from agentrl.extras.doctor.examine import examine
    from agentrl.extras.doctor.report import as_json as json_of
    from agentrl.extras.doctor.report import is_well, summary
    from agentrl.extras.doctor.subject import Subject

    is_given = config is not None
    subject = Subject(Config() if config is None else load_config(config, overrides or []), is_given)
    names = [name.strip() for name in only.split(",") if name.strip()]
    checks = choose_checks(names, on_cluster=cluster)
    of_nodes = [check.name for check in CHECKS if check.of_node and (not names or check.name in names)]
    started = time.monotonic()

    def show(check: Check, diagnoses: Sequence[Diagnosis]) -> None:
        for diagnosis in diagnoses:
            _show(diagnosis)

    found = examine(subject, checks, on_done=None if as_json else show, of_nodes=of_nodes)
    seconds = time.monotonic() - started
    typer.echo(json_of(found, seconds=seconds) if as_json else summary(found, seconds=seconds))
    if not is_well(found):
        sys.exit(1)


def _show(diagnosis: Diagnosis) -> None:
    from agentrl.extras.doctor.report import lines_of

    first, *rest = lines_of(diagnosis)
    colour = typer.style(diagnosis.verdict, fg=_COLOURS[diagnosis.verdict])
    typer.echo(colour + first.removeprefix(diagnosis.verdict))
    for line in rest:
        typer.echo(line)
