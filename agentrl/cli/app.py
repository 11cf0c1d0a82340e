"""The command line as typer has it: the commands of the core, then those of the extras and of others.

An AgentRLError is printed as one line; `--debug` shows its traceback. Only typer is imported at start-up:
each command imports what it needs when it is called.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import distribution
from typing import Annotated, Any, NoReturn, cast

import typer

import agentrl
from agentrl.cli.command import Command, CommandFamily, all_commands
from agentrl.cli.disk import full_disk, refused_path
from agentrl.cli.options import Debug
from agentrl.cli.witness import start_witness
from agentrl.errors import AgentRLError, UserError
from agentrl.registered import cure_of

app = typer.Typer(
    name="agentrl",
    help="Asynchronous reinforcement learning of language-model agents that use tools over many turns.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
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


def _warn(text: str) -> None:
    typer.echo(f"warning: {text}", err=True)


def _add(one: Command | CommandFamily, groups: dict[str, typer.Typer]) -> None:
    if isinstance(one, CommandFamily):
        groups[one.path] = typer.Typer(help=one.text, no_args_is_help=True)
        app.add_typer(groups[one.path], name=one.path, rich_help_panel=one.panel)
        return
    group, _, name = one.path.rpartition(" ")
    to = groups[group] if group else app
    to.command(name, help=one.text, epilog=f"**Example:** `{one.example}`", rich_help_panel=one.panel)(
        one.function
    )


_groups: dict[str, typer.Typer] = {}
for _one in all_commands(_warn):
    _add(_one, _groups)


def _at_home(argument: str) -> str:
    """Expand `~/` in an argument: shells do not expand it in `--out=~/runs` or within quotes."""
    option, _, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    return f"{option}={os.path.expanduser(value)}" if option else os.path.expanduser(value)


def run() -> None:
    """As `agentrl.cli.main` says."""
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
    except ModuleNotFoundError as error:
        if (cure := cure_of(error, distribution("agentrl"))) is None:
            raise
        _end(error, f"this command {cure}", kind="", status=2)
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
