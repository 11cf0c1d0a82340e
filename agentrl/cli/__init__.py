"""The command line: all commands in the order of use, each with an example.

An AgentRLError is printed as one line; `--debug` shows its traceback. Only typer is imported at start-up:
each command imports what it needs when it is called.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn, cast

import typer

import agentrl
from agentrl.cli import configs, data, evaluation, hubs, models, pages, plugins, runs, training
from agentrl.cli.boxes import boxes
from agentrl.cli.compare import compare
from agentrl.cli.disk import full_disk, refused_path
from agentrl.cli.doctor import doctor
from agentrl.cli.options import Debug
from agentrl.cli.planning import plan
from agentrl.cli.score import score
from agentrl.cli.simulation import simulate
from agentrl.cli.view import view
from agentrl.cli.witness import start_witness
from agentrl.errors import AgentRLError, UserError

TRAIN, LOOK, EVALUATE, EXTEND, SERVE, READ = (
    "Train",
    "Inspect runs",
    "Evaluate",
    "Data, configs and plugins",
    "Models and servers",
    "Read",
)

app = typer.Typer(
    name="agentrl",
    help="Asynchronous reinforcement learning of language-model agents that use tools over many turns.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
data_app = typer.Typer(
    help="Write datasets as Parquet in the schema that `agentrl train` reads, and inspect them.",
    no_args_is_help=True,
)
servers_app = typer.Typer(
    help="Manage the inference servers of a running training: list, add or drain them.", no_args_is_help=True
)
config_app = typer.Typer(
    help="Show or explain a config, list the packaged configs, or import a config of verl.",
    no_args_is_help=True,
)

models_app = typer.Typer(
    help="Write models from GGUF files or packages as Hugging Face folders.", no_args_is_help=True
)


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"agentrl {agentrl.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Options of every command."""


def _add(
    to: typer.Typer,
    name: str,
    function: Callable[..., Any],
    example: str,
    *,
    panel: str | None = None,
    text: str | None = None,
) -> None:
    to.command(name, help=text, epilog=f"**Example:** `{example}`", rich_help_panel=panel)(function)


_add(app, "train", training.train, "agentrl train configs/quickstart.yaml trainer.steps=20", panel=TRAIN)
_add(app, "sft", training.sft, "agentrl sft configs/quickstart_sft.yaml", panel=TRAIN)
_add(
    app,
    "rm",
    training.rm,
    "agentrl rm rm.yaml model.path=MODEL data.train_files=[pairs.parquet]",
    panel=TRAIN,
)
_add(app, "replay", training.replay, "agentrl replay runs/quickstart/run --last-step 4", panel=TRAIN)

_add(app, "simulate", simulate, "agentrl simulate run.yaml --sweep max_staleness=0,1,2,4", panel=TRAIN)

_add(
    app,
    "plan",
    plan,
    "agentrl plan qwen3-8b --gpus 64 --gpu h100 --context 32768 --out plan.yaml",
    panel=TRAIN,
)
_add(app, "doctor", doctor, "agentrl doctor configs/quickstart.yaml", panel=TRAIN)

_add(app, "report", runs.report, "agentrl report runs/quickstart/run", panel=LOOK)
_add(app, "view", view, "agentrl view runs/quickstart/run", panel=LOOK)
_add(app, "audit", runs.audit, "agentrl audit runs/quickstart/run", panel=LOOK)
_add(
    app,
    "export",
    runs.export,
    "agentrl export runs/quickstart/run/checkpoints/step_000020 runs/exported",
    panel=LOOK,
)
_add(app, "fetch", runs.fetch, "agentrl fetch s3://bucket/runs/first runs/first", panel=LOOK)
_add(app, "disk", runs.disk, "agentrl disk runs/quickstart/run", panel=LOOK)
_add(app, "boxes", boxes, "agentrl boxes --remove", panel=LOOK)
app.add_typer(servers_app, name="servers", rich_help_panel=LOOK)
_add(servers_app, "list", runs.servers_list, "agentrl servers list runs/quickstart/run")
_add(servers_app, "add", runs.servers_add, "agentrl servers add runs/quickstart/run http://127.0.0.1:30000")
_add(
    servers_app,
    "drain",
    runs.servers_drain,
    "agentrl servers drain runs/quickstart/run http://127.0.0.1:30000",
)

_add(app, "eval", evaluation.evaluate, "agentrl eval --model MODEL --on gsm8k --n 4", panel=EVALUATE)
_add(app, "compare", compare, "agentrl compare runs/eval/before runs/eval/after", panel=EVALUATE)
_add(
    app,
    "generate",
    evaluation.generate,
    "agentrl generate --model MODEL --in rows.parquet --out responses.parquet",
    panel=EVALUATE,
)
_add(app, "score", score, "agentrl score responses.parquet --out scores.parquet", panel=EVALUATE)

app.add_typer(data_app, name="data", rich_help_panel=EXTEND)
_add(data_app, "arithmetic", data.data_arithmetic, "agentrl data arithmetic runs/quickstart/data")
_add(
    data_app,
    "reasoning_gym",
    hubs.data_reasoning_gym,
    "agentrl data reasoning_gym data/sums --generators chain_sum,gcd",
)
_add(
    data_app,
    "gymnasium",
    hubs.data_gymnasium,
    "agentrl data gymnasium data/lake --games FrozenLake-v1",
)
_add(data_app, "harbor", hubs.data_harbor, "agentrl data harbor tasks data/tasks.jsonl")
_add(
    data_app,
    "openenv",
    hubs.data_openenv,
    "agentrl data openenv data/ladder --server ladder=http://127.0.0.1:8000",
)
_add(
    data_app,
    "verifiers",
    hubs.data_verifiers,
    "agentrl data verifiers data/echo --environment echo_v1 --python verifiers/bin/python",
)
_add(
    data_app,
    "textarena",
    hubs.data_textarena,
    "agentrl data textarena data/nim --games Nim-v0 --python textarena/bin/python",
)
_add(
    data_app,
    "tau2",
    hubs.data_tau2,
    "agentrl data tau2 data/desk --tasks tasks.json --environment desk --policy @policy.md --plugin desk.py",
)
for _kind in data.KINDS:
    _add(data_app, _kind, data.writer(_kind), f"agentrl data {_kind} data/{_kind}", text=data.KINDS[_kind])
_add(
    data_app,
    "hf",
    data.data_hf,
    "agentrl data hf OWNER/NAME data/mine --prompt-column question --data-source math",
)
_add(data_app, "preference", data.data_preference, "agentrl data preference data/pairs --in pairs.jsonl")
_add(
    data_app,
    "filter",
    data.data_filter,
    "agentrl data filter train.parquet hard.parquet --difficulty-from runs/eval/mine --max-pass-rate 0.5",
)
_add(data_app, "show", data.data_show, "agentrl data show runs/quickstart/data/train.parquet --rows 2")
app.add_typer(config_app, name="config", rich_help_panel=EXTEND)
_add(config_app, "list", configs.config_list, "agentrl config list")
_add(
    config_app,
    "explain",
    configs.config_explain,
    "agentrl config explain configs/quickstart.yaml buffer.max_staleness=0",
)
_add(config_app, "show", configs.config_show, "agentrl config show recipes/gsm8k_grpo")
_add(config_app, "import", configs.config_import, "agentrl config import ppo_trainer.yaml --out run.yaml")
_add(app, "new", plugins.new, "agentrl new tool word_count --out my_plugins", panel=EXTEND)
_add(app, "plugins", plugins.plugins, "agentrl plugins configs/quickstart.yaml", panel=EXTEND)
_add(app, "play", plugins.play, "agentrl play configs/quickstart.yaml --row 0", panel=EXTEND)

_add(app, "serve", models.serve, "agentrl serve MODEL --port 30000", panel=SERVE)
_add(app, "check-template", models.check_template, "agentrl check-template MODEL --tools", panel=SERVE)
app.add_typer(models_app, name="models", rich_help_panel=SERVE)
_add(models_app, "import", models.models_import, "agentrl models import MODEL.gguf models/mine")
_add(models_app, "fetch", models.models_fetch, "agentrl models fetch smollm2 models/smollm2")
_add(app, "docs", pages.docs, "agentrl docs quickstart", panel=READ)


def _at_home(argument: str) -> str:
    """Expand `~/` in an argument: shells do not expand it in `--out=~/runs` or within quotes."""
    option, _, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    return f"{option}={os.path.expanduser(value)}" if option else os.path.expanduser(value)


def main() -> None:
    """Run the command line. Exit code 2: user error; 1: infrastructure error; 130: Ctrl-C."""
    words = sys.argv[1:]
    start_witness(next((word for word in words if not word.startswith("-")), ""))
    try:
        status = _command()([_at_home(word) for word in words], standalone_mode=False)
        sys.exit(status if isinstance(status, int) else 0)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is shown already
            sys.exit(error.exit_code)
        _end(error, _usage_line(error, words), kind="", status=error.exit_code)
    except typer.Abort as error:
        _end(error, "aborted: the input ended", kind="", status=1)
    except AgentRLError as error:
        kind = "" if isinstance(error, UserError) else " (infrastructure)"
        _end(error, str(error), kind=kind, status=error.exit_code)
    except (OSError, ExceptionGroup) as error:
        if (line := full_disk(error, words)) is not None:
            _end(error, line, kind=" (infrastructure)", status=1)
        if (line := refused_path(error)) is None:
            raise
        _end(error, line, kind="", status=2)


_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""typer names only this subclass of it."""


def _command() -> Any:
    """Return the command line as typer's object, whose flags show no type in the help."""
    command = typer.main.get_command(app)
    todo = [command]
    while todo:
        one = todo.pop()
        todo += getattr(one, "commands", {}).values()
        for option in (*one.params, one.get_help_option(typer.Context(one))):
            if option is not None and getattr(option, "is_flag", False):
                option.metavar = ""
    return command


def _usage_line(error: typer.BadParameter, words: Sequence[str]) -> str:
    """Return what was wrong with the arguments, and where to read on."""
    path = "agentrl" if error.ctx is None else error.ctx.command_path
    text = error.format_message().replace("Value error, ", "").rstrip(".")
    key = next((word for word in words if word.startswith("--") and "." in word.partition("=")[0]), None)
    if key is not None and key.partition("=")[0] in text:
        text += f"; keys of the config are written without dashes: {key.removeprefix('--')}"
    return f"{text}; see `{path} --help`"


def _end(error: Exception, line: str, *, kind: str, status: int) -> NoReturn:
    from agentrl.terminal_text import visible

    if os.environ.get("AGENTRL_DEBUG"):
        traceback.print_exception(error)
    typer.echo(f"error{kind}: {visible(line)}", err=True)
    sys.exit(status)
