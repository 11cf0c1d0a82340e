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
    from agentrl.config.schema import Config
    from agentrl.extras.plan.measure import Simulated


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
        int | None,
        typer.Option(
            help="Run this many random schedules with faults against the laws of the ledger, and stop at the "
            "first that violates one."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the simulation (default: the config's trainer.seed), or of the first hunted "
            "schedule (default: 0); others count up."
        ),
    ] = None,
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
    _refuse_unused(
        {
            "--calibrate": calibrate,
            "--hunt": hunt,
            "--sweep": sweep,
            "--what-if": what_if or None,
            "--tool-hang": tool_hang,
            "--out": out,
            "--json": as_json or None,
            "--seed": seed,
            "--faults": faults,
        },
        config,
    )
    if calibrate is not None:
        _calibrate(calibrate, out)
    elif hunt is not None:
        _hunt(hunt, 0 if seed is None else seed, faults)
    elif config is None:
        raise ConfigError("give a config to simulate, or --hunt 1000 to run so many random schedules")
    else:
        changes = {"trainer.seed": seed, "simulation.tool_hang": tool_hang}
        given = _overrides(overrides or [], changes)
        _simulate(config, given, sweep=sweep, what_if=what_if, out=out, as_json=as_json)


_USED: Mapping[str, tuple[str, ...]] = {
    "--calibrate": ("--out",),
    "--hunt": ("--seed", "--faults"),
    "--sweep": ("--tool-hang", "--out", "--json", "--seed"),
}
"""Options that can be given with those that decide what the command does."""


def _refuse_unused(options: Mapping[str, object], config: str | None) -> None:
    """Raise ConfigError if something was given that the command would not use."""
    given = [name for name, value in options.items() if value is not None]
    for name, used in _USED.items():
        if name not in given:
            continue
        if unused := [other for other in given if other not in (name, *used)]:
            raise ConfigError(
                f"{name} {options[name]} does not use {', '.join(unused)}; leave out one of them"
            )
        if name != "--sweep" and config is not None:
            raise ConfigError(f"{name} {options[name]} has its own configs; leave out {config}")
    if "--faults" in given and "--hunt" not in given:
        raise ConfigError(
            f"--faults {options['--faults']} chooses faults of one schedule; use it with --hunt 1"
        )


def _overrides(given: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """Return all overrides: those given, and those that options stand for.

    Raises:
        ConfigError: an option and an override set the same key.
    """
    added = {key: f"{key}={value}" for key, value in options.items() if value is not None}
    for override in given:
        if (key := _key_of(override)) in added:
            raise ConfigError(f"{override} and an option set {key} twice ({added[key]}); leave out one")
    return [*given, *added.values()]


def _key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _simulate(
    config: str,
    overrides: Sequence[str],
    *,
    sweep: str | None,
    what_if: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Simulate a config, once or with changes; print and draw what is found."""
    from agentrl.config.compose import load_config
    from agentrl.extras.plan.report import lines_of, sweep_table
    from agentrl.extras.plan.sweep import parse_sweep, what_ifs
    from agentrl.extras.plan.written import refuse_out

    if out is not None:
        refuse_out(out, ".png")
    label, changes = "", {"": list[str]()}
    if sweep is not None:
        key, values = parse_sweep(sweep)
        label = key.rpartition(".")[2]
        changes = {value: _overrides([], {key: value}) for value in values}
        _overrides(overrides, {key: values[0]})
    elif what_if:
        label = "change"
        changes = {name: list(own) for name, own in what_ifs(load_config(config, overrides))}
    configs = {name: load_config(config, [*overrides, *own]) for name, own in changes.items()}
    found = {name: _simulated(own) for name, own in configs.items()}
    if as_json:
        typer.echo(json.dumps({name: asdict(own) for name, own in found.items()}, indent=1))
    else:
        lines = sweep_table(label, found) if label else lines_of(configs[""], found[""])
        typer.echo("\n".join(lines))
    if out is not None:
        from agentrl.extras.plan.picture import draw

        draw(found, out, title=f"Simulated: {Path(config).stem}", label=label)
        typer.echo(f"wrote {out}", err=as_json)


def _simulated(config: Config) -> Simulated:
    """Return the simulation of a config, with the memory of its components."""
    from agentrl.extras.plan.memory import components
    from agentrl.extras.plan.simulate import simulate
    from agentrl.extras.plan.speeds import find_size

    found = simulate(config)
    return replace(found, memory_gb=components(config, find_size(config), found))


def _calibrate(folder: Path, out: Path | None) -> None:
    from agentrl.extras.plan.calibrate import calibrate
    from agentrl.extras.plan.written import config_yaml, refuse_out, write_yaml

    if out is not None:
        refuse_out(out, ".yaml")
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
    from agentrl.extras.plan.hunt import hunt_lines

    if num < 1:
        raise ConfigError(f"--hunt {num}: run at least 1 schedule")
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
