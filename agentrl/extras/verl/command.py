"""`agentrl config import`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.options import Debug
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.extras.verl.importing.findings import Dropped
    from agentrl.extras.verl.importing.source import WrittenConfig
    from agentrl.extras.verl.importing.translate import Translation


def config_import(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE.yaml | RUN.sh] [KEY=VALUE]...",
            help="A config of verl, or a script that starts verl (followed by the script's own arguments), "
            "and Hydra overrides.",
        ),
    ] = None,
    config_path: Annotated[
        str | None,
        typer.Option(
            help="Folder of --config-name, as in verl's run scripts; in a checkout, relative to the module's "
            "folder."
        ),
    ] = None,
    config_name: Annotated[
        str | None,
        typer.Option(help="Name of the config, as in verl's run scripts; used instead of FILE.yaml."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="File to write the config to; default: print it.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Write the config even if parts of it cannot run in agentrl unchanged."),
    ] = False,
    debug: Debug = False,
) -> None:
    """Translate a config or a run script of verl, and say of each key what became of it: mapped, dropped, or
    without meaning here.

    A script is read, never run: its variables, arrays, arguments and conditions are followed up to the
    command that starts a training. What is written is checked against the schema first; `agentrl config
    explain run.yaml` shows what it amounts to. What would not run here as it is comes first; then nothing is
    written, and the exit code is 1, unless --force is given. Scripts of supervised training become a config
    for `agentrl sft`; configs of generation and evaluation become command lines. See
    docs/coming_from_verl.md.
    """
    from agentrl.config.compose import dump_values
    from agentrl.extras.verl.importing.steps import step_of
    from agentrl.extras.verl.importing.translate import translate

    try:
        source = _read(arguments or [], config_path, config_name)
    except (RecursionError, MemoryError):
        raise ConfigError("it is nested too deeply to be read") from None
    step = step_of(source)
    if step is not None:
        for key in step.unused:
            typer.echo(f"no option: {key} = {_shown(source.written[key])}", err=True)
        typer.echo(step.command)
        return
    translation = translate(source)
    text = dump_values(translation.values)
    typer.echo("\n".join(account(translation, source)), err=True)
    is_other = translation.obstacles or translation.decisive or any(map(source.get, translation.unknown))
    if is_other and not force:
        typer.echo("nothing was written; --force writes the keys that can be translated", err=True)
        raise typer.Exit(1)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {out}")


def _read(arguments: Sequence[str], config_path: str | None, config_name: str | None) -> WrittenConfig:
    from agentrl.extras.verl.importing.launches import MAIN, source_of, source_of_file
    from agentrl.extras.verl.importing.script import Launch, is_script, read_launch

    is_file = bool(arguments) and "=" not in arguments[0] and not arguments[0].startswith("~")
    first, rest = (arguments[0], arguments[1:]) if is_file else (None, arguments)
    if first is not None and is_script(first):
        launch = read_launch(first, rest)
        return source_of(
            replace(
                launch,
                config_path=config_path or launch.config_path,
                config_name=config_name or launch.config_name,
            )
        )
    if first is not None and config_name is None:
        return source_of_file(first, rest)
    if config_name is None:
        return source_of_file(None, arguments)
    return source_of(Launch(MAIN, tuple(arguments), config_path, config_name))


def account(translation: Translation, source: WrittenConfig) -> Iterator[str]:
    """Yield the lines about what became of each key; obstacles come first."""
    if translation.obstacles:
        yield f"will not run as it is: {len(translation.obstacles)}"
    yield from (f"  {obstacle.what}: {obstacle.reason}" for obstacle in translation.obstacles)
    yield from _listed("trains something else", translation.decisive, source)
    yield f"mapped: {len(translation.mapped)}"
    for setting in translation.mapped:
        old = (
            ", ".join(key if key in source.written else f"{key} (verl's default)" for key in setting.old)
            or "verl"
        )
        yield f"  {old} -> {setting.key} = {_shown(setting.value)}" + (
            f"  # {setting.note}" if setting.note else ""
        )
    yield from _listed(
        "dropped", [finding for finding in translation.dropped if not finding.is_decisive], source
    )
    yield from _listed("no meaning here", translation.meaningless, source)
    if translation.unknown:
        yield f"unknown: {len(translation.unknown)}, neither a known key of verl nor a key of agentrl"
        yield from (f"  {key} = {_shown(source.written[key])}" for key in translation.unknown)
    if source.unread:
        yield "not read:"
        yield from (f"  {text}" for text in source.unread)


def _listed(title: str, findings: Sequence[Dropped], source: WrittenConfig) -> Iterator[str]:
    if findings:
        yield f"{title}: {len(findings)}"
    for finding in findings:
        value = (
            f" = {_shown(source.written[finding.old])}"
            if finding.old in source.written
            else " (verl's default)"
        )
        yield f"  {finding.old}{value}: {finding.reason}"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
