"""The command line: one short function per command. Errors of ours are one line; `--debug` shows the traceback."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl.config.importing.cli import import_config
from agentrl.data.commands import data_app
from agentrl.errors import AgentRLError, UserError
from agentrl.evaluation.commands import evaluate, generate
from agentrl.evaluation.compare_cli import compare
from agentrl.evaluation.score_cli import score

app = typer.Typer(
    name="agentrl",
    help="Asynchronous reinforcement learning of language-model agents that use tools over many turns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
servers_app = typer.Typer(help="The inference servers of a run that goes on: list them, add one, let one go.", no_args_is_help=True)
config_app = typer.Typer(help="Look at a config before running it.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(servers_app, name="servers")
app.add_typer(config_app, name="config")
app.command("eval")(evaluate)
app.command()(generate)
app.command()(score)
app.command()(compare)
config_app.command("import")(import_config)

ConfigFile = Annotated[
    str, typer.Argument(metavar="CONFIG.yaml", help="YAML file; it holds differences from the defaults in docs/config.md.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Hydra overrides, such as trainer.steps=20 rollout.group_size=8.")
]
Command = Annotated[Literal["train", "sft", "rm"], typer.Option("--for", help="The command that the config is for.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that goes on.")]
Patience = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds until the request is withdrawn: runs answer between steps.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


@app.callback()
def _options(debug: Debug = False) -> None:
    if debug:
        os.environ["AGENTRL_DEBUG"] = "1"


@app.command()
def train(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a policy.

    Starts Ray, inference servers, rollout actors and learner ranks on this machine (or on the cluster of `cluster.address`), trains for
    `trainer.steps` batches and leaves everything in the run folder. Run the same command again to resume.

    Every key is documented in docs/config.md; `agentrl config explain CONFIG.yaml` shows what a config amounts to.
    """
    _options(debug)
    from agentrl.config.compose import load_config

    checked = load_config(config, overrides or [])  # a mistake is told before the seconds that torch takes to load
    from agentrl.controller.train import train as run

    with _resumable():
        run(checked)


@app.command()
def sft(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a policy by imitation (supervised fine-tuning), from `model.path` or from scratch."""
    _options(debug)
    from agentrl.config.compose import load_sft_config

    checked = load_sft_config(config, overrides or [])
    from agentrl.controller.sft import supervise

    with _resumable():
        supervise(checked)


@app.command()
def rm(config: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a reward model on pairs of answers of which one was preferred, from `model.path` or from scratch."""
    _options(debug)
    from agentrl.config.compose import load_rm_config

    checked = load_rm_config(config, overrides or [])
    from agentrl.controller.reward_model import train_reward_model

    with _resumable():
        train_reward_model(checked)


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run, or its folder of step_000001.parquet, ...")],
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option(metavar="CONFIG.yaml", help="Instead of the config.yaml of the run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the replay; default: `replay` in DIR.")] = None,
    last_step: Annotated[int | None, typer.Option(min=1, help="Stop after this step; the same command without it goes on.")] = None,
    report: Annotated[bool, typer.Option("--report", help="Compare corrections on every step (docs/replay.md).")] = False,
    debug: Debug = False,
) -> None:
    """Train the learner alone from stored trajectories: deterministic, without servers and rollouts."""
    _options(debug)
    from agentrl.controller.replay import load_replay_config
    from agentrl.controller.replay import replay as run

    run(folder, load_replay_config(folder, overrides or [], file=config, out=out), last_step=last_step, report=report)


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a training run; it may still go on.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, the groups of each task included.")] = False,
    debug: Debug = False,
) -> None:
    """Prove what became of every group: follow the run's journal, and compare it with what else the run wrote. Ends with 1 if it fails."""
    _options(debug)
    from agentrl.controller.audit import audit_run

    found = audit_run(folder)
    typer.echo(found.to_json() if as_json else "\n".join(found.lines()))
    raise typer.Exit(0 if found.audit.is_balanced else 1)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder of a checkpoint: RUN/checkpoints/step_000020.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must not exist.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapter alone, in peft's format, not the merged model.")
    ] = False,
    base: Annotated[str | None, typer.Option(help="Folder or hub id of the model under the adapter, if it has moved.")] = None,
    trust: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code of the model that the checkpoint names; without it, refuse.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write the policy of a checkpoint in Hugging Face format, as transformers and SGLang load it. Needs no Ray and no GPU."""
    _options(debug)
    from agentrl.controller.export import export_checkpoint

    export_checkpoint(checkpoint, out, adapter_only=adapter, base=base, trusts_code=trust)
    typer.echo(f"wrote {out}")


@app.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of the model, in Hugging Face format, or a hub id.")],
    host: Annotated[str, typer.Option(help="Address to listen on; anything but localhost needs --api-key-env.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 30000,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    weight_version: Annotated[str, typer.Option(help="Version that replies carry until the first update.")] = "default",
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the API key.")] = None,
    debug: Debug = False,
) -> None:
    """Serve a model by the embedded server, which speaks SGLang's native protocol (docs/sglang.md)."""
    _options(debug)
    from agentrl.config.model import ModelConfig
    from agentrl.config.rollout import EmbeddedServerConfig
    from agentrl.data.model_source import find_model
    from agentrl.serving.embedded.server import serve as run
    from agentrl.serving.embedded.server import set_up_logging

    set_up_logging()
    status = run(
        str(find_model(ModelConfig(path=model))),
        host=host,
        port=port,
        config=EmbeddedServerConfig(threads=threads),
        dtype=dtype,
        weight_version=weight_version,
        api_key_env=api_key_env,
    )
    sys.exit(status)


@app.command()
def new(
    kind: Annotated[Literal["tool", "interaction", "agent", "reward"], typer.Argument(metavar="tool|interaction|agent|reward")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, in small letters: word_count.")],
    out: Annotated[Path, typer.Option(help="Folder to write into.")] = Path("."),
    debug: Debug = False,
) -> None:
    """Write a plugin to begin with: its file, a test that passes, and how to name it in a config."""
    _options(debug)
    from agentrl.scaffold.scaffold import write_plugin

    written = write_plugin(kind, name, out)
    typer.echo(f"wrote {written.file} and {written.test}; try it: pytest {written.test}\n\nName it in your config:\n\n{written.yaml}")


@app.command()
def plugins(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG.yaml]", help="Also what this config names: files, MCP servers.")] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the whole schemas.")] = False,
    debug: Debug = False,
) -> None:
    """List all plugins: where they come from, what they are for, what arguments tools take."""
    _options(debug)
    from agentrl.adapters.catalog import named_plugins
    from agentrl.config.compose import load_config
    from agentrl.config.schema import Config
    from agentrl.plugins.listing import format_plugins, list_plugins

    infos = list_plugins(named_plugins(load_config(config, overrides or []) if config else Config()))
    typer.echo(json.dumps([asdict(info) for info in infos], indent=2) if as_json else format_plugins(infos))


@app.command()
def play(
    config: ConfigFile,
    overrides: Overrides = None,
    row: Annotated[int, typer.Option(min=0, help="Which row of data.train_files, counted from 0.")] = 0,
    model: Annotated[
        str, typer.Option(metavar="person|SCRIPT.yaml|URL", help="Who plays the model: you, a list of turns, or a server.")
    ] = "person",
    val: Annotated[bool, typer.Option("--val", help="A row of data.val_files, sampled as in validation.")] = False,
    start: Annotated[bool, typer.Option("--start", help="Start the config's server for it, and end it afterwards.")] = False,
    debug: Debug = False,
) -> None:
    """Play one conversation through the real loop: transcript, tokens by mask, tools, rewards. Needs no Ray."""
    _options(debug)
    from rich.console import Console

    from agentrl.config.compose import load_config
    from agentrl.play.play import play_row
    from agentrl.play.show import show

    loaded = load_config(config, overrides or [])
    show(play_row(loaded, row=row, model=model, is_validation=val, starts_server=start, read=_typed_line, say=typer.echo), Console())


@app.command("check-template")
def check_template(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a tokenizer or model, or a hub id.")],
    tools: Annotated[bool | None, typer.Option("--tools/--no-tools", help="With tool calls; default: if the template shows any.")] = None,
    template: Annotated[str | None, typer.Option(help="Jinja file that replaces the tokenizer's own template.")] = None,
    tool_format: Annotated[str, typer.Option(help="How the model writes calls; auto: from the template (docs/tool_formats.md).")] = "auto",
    num: Annotated[int, typer.Option(min=1, help="Conversations to generate.")] = 300,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    debug: Debug = False,
) -> None:
    """Check a chat template on generated conversations: exact, forks (exit code 0) or broken (2). See docs/templates.md."""
    _options(debug)
    from agentrl.chat.chat import Chat
    from agentrl.chat.probes import PROBE_TOOLS
    from agentrl.data.model_source import find_tokenizer

    chat = Chat.load(str(find_tokenizer(model)), template_file=template, tool_format=tool_format)
    report = chat.report_template({None: None, True: PROBE_TOOLS, False: ()}[tools], num=num, seed=seed)
    typer.echo(f"tool format: {chat.tool_format}")
    typer.echo("\n".join(report.lines()))
    if report.verdict == "broken":
        sys.exit(UserError.exit_code)


def _typed_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


@servers_app.command("list")
def servers_list(
    run: RunFolder,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """List the servers: state, version, tokens that agents wait for (prompt and what may still be sampled), restarts."""
    _options(debug)
    from agentrl.controller.control import read_servers
    from agentrl.controller.server_table import format_servers

    table = read_servers(run)
    typer.echo(table.model_dump_json(indent=1) if as_json else format_servers(table))


@servers_app.command("add")
def servers_add(
    run: RunFolder,
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="A running server to attach to.")] = None,
    start: Annotated[bool, typer.Option("--start", help="Start one more, of the kind and with the options that the run has.")] = False,
    timeout_s: Patience = 600.0,
    debug: Debug = False,
) -> None:
    """Let a server join: it gets the current weights, is checked, and then serves."""
    _options(debug)
    from agentrl.controller.control import Request, ask

    if start == (url is not None):
        raise UserError("name the URL of a running server, or use --start; one of the two")
    typer.echo(ask(run, Request(verb="attach", server=url) if url is not None else Request(verb="start"), timeout_s=timeout_s))


@servers_app.command("drain")
def servers_drain(
    run: RunFolder,
    server: Annotated[str, typer.Argument(metavar="URL", help="URL of the server, or its name in the list.")],
    timeout_s: Patience = 600.0,
    debug: Debug = False,
) -> None:
    """Let a server go: its trajectories go on elsewhere from what they have. One that the run started ends, another is left as it is."""
    _options(debug)
    from agentrl.controller.control import Request, ask

    typer.echo(ask(run, Request(verb="drain", server=server), timeout_s=timeout_s))


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None, command: Command = "train", debug: Debug = False) -> None:
    """Print the resolved config, defaults included."""
    _options(debug)
    from agentrl.config.compose import dump_config, load_config, load_rm_config, load_sft_config

    loaders = {"train": load_config, "sft": load_sft_config, "rm": load_rm_config}
    typer.echo(dump_config(loaders[command](config, overrides or [])))


@config_app.command("explain")
def config_explain(config: ConfigFile, overrides: Overrides = None, command: Command = "train", debug: Debug = False) -> None:
    """Print what a config amounts to: batch arithmetic, bound on lag, which weights enter the loss, warnings."""
    _options(debug)
    from agentrl.config.compose import load_config, load_rm_config, load_sft_config
    from agentrl.config.explain import explain
    from agentrl.config.explain_supervised import explain_supervised

    if command == "train":
        typer.echo(explain(load_config(config, overrides or [])))
    else:
        load = load_sft_config if command == "sft" else load_rm_config
        typer.echo(explain_supervised(load(config, overrides or [])))


@contextmanager
def _resumable() -> Iterator[None]:
    """Say at Ctrl-C what becomes of the run; the command then ends with 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted; the run folder keeps everything saved so far, the same command resumes", err=True)
        raise


def main() -> None:
    """Run the command line; exit code 2 for the user's mistakes, 1 for the world's, 130 for Ctrl-C."""
    try:
        app(standalone_mode=True)
    except AgentRLError as error:
        if os.environ.get("AGENTRL_DEBUG"):
            traceback.print_exc()
        kind = "" if isinstance(error, UserError) else " (infrastructure)"
        typer.echo(f"error{kind}: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
