"""`agentrl simulate`: the scheduler on a virtual clock."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Debug, Overrides
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.simulation.measure import Simulated


def simulate(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG.yaml",
            help="Config of a training; its section `simulation` has hardware and tasks. Not "
            "needed with --hunt.",
        ),
    ] = None,
    overrides: Overrides = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="KEY=V1,V2,...: simulate once per value, such as max_staleness=0,1,2,4."),
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Relieve one component after the other, and say what it gains.")
    ] = False,
    tool_hang: Annotated[
        float | None,
        typer.Option(help="Share of tool calls that hang until agent.tool_timeout_s (simulation.tool_hang)."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Print the config of a recorded run, to be simulated: with rates, lengths and latencies "
            "from its metrics and trajectories.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Draw a picture into this PNG file; with --calibrate, write this YAML file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
    hunt: Annotated[
        int,
        typer.Option(
            help="Run this many random schedules with faults against the laws of the ledger, and stop at the "
            "first that violates one."
        ),
    ] = 0,
    seed: Annotated[
        int, typer.Option(help="Seed of the simulation, or of the first hunted schedule; others count up.")
    ] = 0,
    faults: Annotated[
        str | None,
        typer.Option(
            help="With --hunt 1: only these of the schedule's faults happen, such as 0,3, or none. The line "
            "of a violation has them."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Simulate a training: the real scheduler on a virtual clock, against modelled servers, ranks and tools.

    With --hunt, random schedules with faults are checked instead; the exit code is 1 if one violates a law.
    """
    logging.getLogger("agentrl").setLevel(logging.ERROR)  # servers are lost all the time
    if calibrate is not None:
        if config is not None or hunt:
            raise ConfigError(
                f"--calibrate {calibrate} needs nothing else; simulate the config that it prints"
            )
        _calibrate(calibrate, out)
        return
    if hunt or config is None:
        if config is not None:
            raise ConfigError(f"--hunt {hunt} draws its own configs; leave out {config}")
        _hunt(hunt, seed, faults)
        return
    if faults is not None:
        raise ConfigError(f"--faults {faults} chooses faults of one schedule; use it with --hunt 1")
    given = [*(overrides or []), f"trainer.seed={seed}"]
    given += [] if tool_hang is None else [f"simulation.tool_hang={tool_hang}"]
    if sweep is not None:
        found, label = _sweep(config, given, sweep, is_quiet=as_json)
    elif what_if:
        found, label = _what_if(config, given, is_quiet=as_json), "change"
    else:
        found, label = {"": _simulate(config, given, is_quiet=as_json)}, ""
    if as_json:
        typer.echo(json.dumps({name: asdict(own) for name, own in found.items()}, indent=1))
    if out is not None:
        from agentrl.simulation.picture import draw

        draw(found, out, title=f"Simulated: {Path(config).stem}", label=label)
        typer.echo(f"wrote {out}", err=as_json)


def _calibrate(folder: Path, out: Path | None) -> None:
    from agentrl.simulation.calibrate import calibrate
    from agentrl.simulation.written import config_yaml, write_yaml

    found = calibrate(folder)
    lines = [
        f"{folder}: {found.step_s:,.2f} s per step, mean of {found.num_steps} steps; {found.num_attempts} "
        f"attempts read, {found.num_left_out} left out (failed, or of several segments)",
    ]
    text = config_yaml(found.config, lines)
    if out is None:
        typer.echo(text, nl=False)
        return
    write_yaml(out, text)
    typer.echo("\n".join([*lines, f"wrote {out}"]))


def _hunt(num: int, seed: int, faults: str | None) -> None:
    from agentrl.simulation.hunt import hunt_lines

    if num < 1:
        raise ConfigError("give a config to simulate, or --hunt 1000 to run so many random schedules")
    if faults is not None and num != 1:
        raise ConfigError(f"--faults {faults} chooses faults of one schedule; use it with --hunt 1")
    has_failed = False
    for line in hunt_lines(num, seed=seed, kept=None if faults is None else _numbers(faults)):
        typer.echo(line.text)
        has_failed |= line.is_violation
    raise typer.Exit(int(has_failed))


def _numbers(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--faults {text}: use numbers of faults such as 0,3, or none") from None


def _simulate(config: str, overrides: Sequence[str], *, is_quiet: bool) -> Simulated:
    from agentrl.config.compose import load_config
    from agentrl.simulation.memory import components
    from agentrl.simulation.report import lines_of
    from agentrl.simulation.simulate import simulate
    from agentrl.simulation.speeds import find_size

    loaded = load_config(config, overrides)
    found = simulate(loaded)
    found = replace(found, memory_gb=components(loaded, find_size(loaded), found))
    if not is_quiet:
        typer.echo("\n".join(lines_of(loaded, found)))
    return found


def _sweep(
    config: str, overrides: Sequence[str], sweep: str, *, is_quiet: bool
) -> tuple[Mapping[str, Simulated], str]:
    from agentrl.simulation.report import sweep_table
    from agentrl.simulation.sweep import parse_sweep

    key, values = parse_sweep(sweep)
    found = {value: _simulate(config, [*overrides, f"{key}={value}"], is_quiet=True) for value in values}
    label = key.rpartition(".")[2]
    if not is_quiet:
        typer.echo("\n".join(sweep_table(label, found)))
    return found, label


def _what_if(config: str, overrides: Sequence[str], *, is_quiet: bool) -> Mapping[str, Simulated]:
    from agentrl.config.compose import load_config
    from agentrl.simulation.report import sweep_table
    from agentrl.simulation.sweep import what_ifs

    found = {
        name: _simulate(config, [*overrides, *changes], is_quiet=True)
        for name, changes in what_ifs(load_config(config, overrides))
    }
    if not is_quiet:
        typer.echo("\n".join(sweep_table("change", found)))
    return found
