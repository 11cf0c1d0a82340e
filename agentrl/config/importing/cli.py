"""`agentrl config import`: its options, and the account that it prints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from agentrl.config.importing.findings import Dropped
    from agentrl.config.importing.source import Source
    from agentrl.config.importing.translate import Translation


def import_config(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE.yaml] [KEY=VALUE]...", help="A config of verl, and the overrides of its command line (Hydra)."),
    ] = None,
    config_path: Annotated[Path, typer.Option(help="Folder of --config-name, as in verl's run scripts.")] = Path(),
    config_name: Annotated[str | None, typer.Option(help="The config's name, as in verl's run scripts; instead of FILE.yaml.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Write the config there; default: print it.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Translate a config of verl, and say of each key what became of it: mapped, dropped, or without meaning here.

    In a run script of verl, put `agentrl config import --out run.yaml` in place of `python3 -m verl.trainer.main_ppo`. What is written is
    checked against the schema first; `agentrl config explain run.yaml` shows what it amounts to. Configs of generation and evaluation
    become command lines. See docs/coming_from_verl.md.
    """
    if debug:
        os.environ["AGENTRL_DEBUG"] = "1"
    from agentrl.config.compose import dump_values
    from agentrl.config.importing.source import read_source
    from agentrl.config.importing.steps import step_of
    from agentrl.config.importing.translate import translate

    file, overrides = _split(arguments or [], config_path, config_name)
    source = read_source(file, overrides)
    step = step_of(source)
    if step is not None:
        for key in step.unused:
            typer.echo(f"no option: {key} = {_shown(source.written[key])}", err=True)
        typer.echo(step.command)
        return
    translation = translate(source)
    text = dump_values(translation.values)
    typer.echo("\n".join(account(translation, source)), err=True)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        typer.echo(f"wrote {out}")


def _split(arguments: Sequence[str], config_path: Path, config_name: str | None) -> tuple[str | None, list[str]]:
    """Tell the file from the overrides; what is of verl itself is what an import begins with anyway."""
    from agentrl.config.importing.source import OF_VERL

    name = (config_name or OF_VERL[0]).removesuffix(".yaml")
    named = None if name in OF_VERL else str(config_path / f"{name}.yaml")
    if named is None and arguments and "=" not in arguments[0] and not arguments[0].startswith("~"):
        return arguments[0], list(arguments[1:])
    return named, list(arguments)


def account(translation: Translation, source: Source) -> Iterator[str]:
    """Yield the lines that say what became of each key."""
    yield f"mapped: {len(translation.mapped)}"
    for setting in translation.mapped:
        old = ", ".join(key if key in source.written else f"{key} (verl's default)" for key in setting.old) or "verl"
        yield f"  {old} -> {setting.key} = {_shown(setting.value)}" + (f"  # {setting.note}" if setting.note else "")
    yield from _listed("dropped", translation.dropped, source)
    yield from _listed("no meaning here", translation.meaningless, source)
    if translation.unknown:
        yield f"unknown: {len(translation.unknown)}, neither a key of verl that is known here nor one of ours"
        yield from (f"  {key} = {_shown(source.written[key])}" for key in translation.unknown)
    if source.unread:
        yield "not read:"
        yield from (f"  {text}" for text in source.unread)


def _listed(title: str, findings: Sequence[Dropped], source: Source) -> Iterator[str]:
    if findings:
        yield f"{title}: {len(findings)}"
    for finding in findings:
        value = f" = {_shown(source.written[finding.old])}" if finding.old in source.written else " (verl's default)"
        yield f"  {finding.old}{value}: {finding.reason}"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
