"""`agentrl config list`, `show`, `explain` and `import`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from agentrl.cli.options import ConfigFile, Debug, Overrides
from agentrl.errors import ConfigError, concerning

if TYPE_CHECKING:
    from agentrl.config.model import ModelConfig
    from agentrl.config.schema import Config

Command = Annotated[
    Literal["train", "sft", "rm"], typer.Option("--for", help="The command for which the config is written.")
]


def config_show(
    config: ConfigFile, overrides: Overrides = None, command: Command = "train", debug: Debug = False
) -> None:
    """Print the resolved config, defaults included."""
    from agentrl.config.compose import dump_config, load_config, load_rm_config, load_sft_config

    loaders = {"train": load_config, "sft": load_sft_config, "rm": load_rm_config}
    typer.echo(dump_config(loaders[command](config, overrides or [])))


def config_explain(
    config: ConfigFile, overrides: Overrides = None, command: Command = "train", debug: Debug = False
) -> None:
    """Print what a config amounts to: batch arithmetic, bound on lag, which weights enter the loss, memory of
    each role, warnings.

    The exit code is 2 if a GPU is too small for what it must hold (cluster.gpu_memory_gb), or if a model in a
    local folder cannot be trained.
    """
    from agentrl.config.compose import load_config, load_rm_config, load_sft_config
    from agentrl.config.explain import explain
    from agentrl.config.explain_memory import refuse_too_large
    from agentrl.config.explain_supervised import explain_supervised

    if command == "train":
        loaded = load_config(config, overrides or [])
        typer.echo(explain(loaded, flops_per_s=_measured_speed(loaded)))
        refuse_too_large(loaded)
        _check_local(loaded.learner_models)
    else:
        load = load_sft_config if command == "sft" else load_rm_config
        supervised = load(config, overrides or [])
        typer.echo(explain_supervised(supervised))
        if supervised.from_scratch.architecture == "none":
            _check_local({"actor": supervised.model})


def _check_local(models: Mapping[str, ModelConfig]) -> None:
    """Check the architectures of models in local folders, by role; what is warned about is not repeated."""
    from agentrl.config.model_kind import find_obstacles

    folders = {role: Path(model.path).expanduser() for role, model in models.items() if model.path}
    for role, folder in folders.items():
        if (folder / "config.json").is_file() and not find_obstacles(str(folder)):
            from agentrl.learner.layout import check_architecture

            with concerning(role):
                check_architecture(models[role].model_copy(update={"path": str(folder)}))


def _measured_speed(config: Config) -> float | None:
    """Measure one thread with the policy's matrices; None if the policy does not run on CPUs."""
    from agentrl.config.explain_cpu import cpu_model

    if (size := cpu_model(config)) is None:
        return None
    from agentrl.learner.matrix_speed import measure_flops_per_s

    return measure_flops_per_s(size.hidden_size, size.intermediate_size, dtype=config.model.dtype)


def config_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: name, is_whole, text.")] = False,
    debug: Debug = False,
) -> None:
    """List the packaged configs: those that run as they are, and the parts of which a `defaults` list picks
    one of each folder.
    """
    from agentrl.config.packaged import packaged_configs

    found = packaged_configs()
    if as_json:
        typer.echo(json.dumps([asdict(config) for config in found], indent=2))
        return
    width = max(len(config.name) for config in found)
    for folder, members in itertools.groupby(
        found, key=lambda config: None if config.is_whole else config.folder
    ):
        heading = (
            "Configs: agentrl train NAME" if folder is None else f"Parts: agentrl train CONFIG {folder}=NAME"
        )
        typer.echo(
            f"{heading}\n"
            + "\n".join(f"  {config.name.ljust(width)}  {config.text}" for config in members)
            + "\n"
        )


if TYPE_CHECKING:
    from agentrl.verl.importing.findings import Dropped
    from agentrl.verl.importing.source import WrittenConfig
    from agentrl.verl.importing.translate import Translation


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
    from agentrl.verl.importing.steps import step_of
    from agentrl.verl.importing.translate import translate

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
    from agentrl.verl.importing.launches import MAIN, source_of, source_of_file
    from agentrl.verl.importing.script import Launch, is_script, read_launch

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
