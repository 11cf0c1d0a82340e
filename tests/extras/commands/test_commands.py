"""The command line with the commands of all extras."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from agentrl.cli import main
from agentrl.cli.app import app
from agentrl.data.input_files import check_prepared
from agentrl.errors import ConfigError
from agentrl.extras.supervised.config import load_sft_config
from parts.docs_commands import command as problems_of
from parts.docs_names import read_project


def leaves(command: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the words of each command that does something, and the command."""
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name, one in below.items():
        yield from leaves(one, (*path, name))


project = functools.cache(read_project)
"""Read by the tests that ask for it: it takes seconds, and this file is imported by every process of the
tests.
"""
COMMANDS = dict(leaves(typer.main.get_command(app)))


def run(*words: str, **env: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "300", **env})
    return done.exit_code, done.stdout


def test_commands_come_in_the_order_of_use() -> None:
    names = [path[0] for path in COMMANDS]
    assert names[0] == "train"
    assert names.index("train") < names.index("eval") < names.index("report") < names.index("serve")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_help_has_an_example_that_could_be_run(path: tuple[str, ...]) -> None:
    status, text = run(*path, "--help")
    example = text.rpartition("Example:")[2].strip()
    assert status == 0
    assert example.split()[: len(path) + 1] == ["agentrl", *path]
    assert list(problems_of(example, project())) == []


def test_the_page_of_commands_names_every_command() -> None:
    page = (Path(__file__).parents[3] / "docs/commands.md").read_text()
    assert [
        path
        for path in COMMANDS
        if path[0] not in ("data", "servers") and f"`agentrl {' '.join(path)}" not in page
    ] == []


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """Return exit code and standard error of a command line."""
    monkeypatch.setattr(sys, "argv", ["agentrl", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("file", "'{}/file': File exists; choose another name"),
        ("file/below", "'{}/file/below': Not a directory; a part of this path is a file; choose another"),
        ("x" * 300, "'{}/" + "x" * 300 + "/abc.py': File name too long; choose a shorter name"),
    ],
)
def test_a_path_that_cannot_be_written_is_one_line(path, line, tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "file").touch()
    status, text = said(capsys, monkeypatch, "new", "tool", "abc", "--out", str(tmp_path / path))
    assert (status, text) == (2, f"error: {line.format(tmp_path)} (--debug shows where)\n")


def test_a_run_is_not_taken_for_an_evaluation(tmp_path, capsys, monkeypatch) -> None:
    for name in ("checkpoints", "validation"):
        (tmp_path / "run" / name).mkdir(parents=True)
    newest = tmp_path / "run/validation/step_000040.parquet"
    newest.touch()
    _, text = said(capsys, monkeypatch, "compare", str(tmp_path / "run"), str(newest))
    assert text.endswith(f"not an evaluation; name one of its validations, such as {newest}\n")
    _, text = said(capsys, monkeypatch, "compare", str(newest), str(newest))
    assert text.startswith(f"note: both are {newest}, which is compared with itself\n")


def test_other_parquet_files_are_not_shown_as_attempts(tmp_path, capsys, monkeypatch) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "rows.parquet")
    for path in (tmp_path, tmp_path / "rows.parquet"):
        status, text = said(capsys, monkeypatch, "view", str(path))
        assert (status, text) == (
            2,
            f"error: {str(path)!r} has no trajectories; give the folder of a run or of an evaluation\n",
        )


def test_an_engine_that_does_not_answer_is_left_out(tmp_path, capsys, monkeypatch) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'is the daemon running?' >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    status, text = said(capsys, monkeypatch, "boxes")
    line = "left out, because it does not answer: `docker ps` failed: is the daemon running?"
    assert (status, [one for one in text.splitlines() if "docker" in one]) == (0, [line])
    assert said(capsys, monkeypatch, "boxes", "--command", str(docker))[0] == 1


def test_a_packaged_config_says_which_commands_make_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["train", "quickstart"])
    first, *commands = str(done.exception).splitlines()
    assert (
        first
        == "model.path='runs/quickstart/warm_start' does not exist yet; these commands create the missing "
        "files:"
    )
    assert commands == ["  agentrl data arithmetic runs/quickstart/data", "  agentrl sft quickstart_sft"]
    assert all(list(problems_of(line, project())) == [] for line in commands)
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=rf"this command creates the missing files:\n{commands[0]}$"):
        check_prepared(load_sft_config("quickstart_sft"))


def test_a_kind_that_does_not_exist_is_one_line(capsys, monkeypatch) -> None:
    kinds = "tool|interaction|environment|agent|reward"
    choices = ", ".join(map(repr, kinds.split("|")))
    status, text = said(capsys, monkeypatch, "new", "gadget", "abc")
    line = f"Invalid value for {kinds!r}: 'gadget' is not one of {choices}; see `agentrl new --help`"
    assert (status, text) == (2, f"error: {line}\n")


def test_the_page_of_an_extra_is_read_by_its_name() -> None:
    boxes = "agentrl/extras/boxes/README.md"
    by_name, by_path = (CliRunner().invoke(app, ["docs", name]) for name in ("boxes", boxes))
    assert by_name.output == by_path.output == (Path(__file__).parents[3] / boxes).read_text() + "\n"
