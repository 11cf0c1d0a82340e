"""The command line as a stranger meets it: help, version, completion, what is packaged, what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import agentrl
from agentrl.cli import main
from agentrl.cli import pages as documentation
from agentrl.cli.app import app
from agentrl.config.compose import load_config
from agentrl.data.input_files import check_prepared

ROOT = Path(__file__).parents[2]


def run(*words: str, **env: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "300", **env})
    return done.exit_code, done.stdout


def test_the_command_line_loads_nothing_heavy() -> None:
    code = (
        "import sys, agentrl.cli; print([m for m in sys.modules if m in {'numpy', 'pydantic', 'trio', "
        "'pyarrow', 'hydra', 'torch', 'ray'}])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_version() -> None:
    assert run("--version") == (0, f"agentrl {agentrl.__version__}\n")


def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """Return exit code and standard error of a command line."""
    monkeypatch.setattr(sys, "argv", ["agentrl", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["trian", "base.yaml"], "No such command 'trian'. Did you mean 'train'?; see `agentrl --help`"),
        (
            ["train", "base.yaml", "--trainer.steps=5"],
            "No such option: --trainer.steps; keys of the config are written without dashes: "
            "trainer.steps=5; see `agentrl train --help`",
        ),
        (["train"], "Missing argument 'CONFIG.yaml'; see `agentrl train --help`"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_mistake_of_usage_is_one_line_as_any_other(words, line, capsys, monkeypatch) -> None:
    assert said(capsys, monkeypatch, *words) == (2, f"error: {line}\n")


def test_the_end_of_a_command_is_its_exit_code(capsys, monkeypatch) -> None:
    assert said(capsys, monkeypatch, "config", "list") == (0, "")
    assert said(capsys, monkeypatch, "config") == (2, "")  # the help


def test_flags_show_no_type(capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["agentrl", "train", "--help"])
    with pytest.raises(SystemExit):
        main()
    text = capsys.readouterr().out
    assert "--debug" in text
    assert "bool" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    words = {"COMP_WORDS": "agentrl con", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "agentrl con"}
    env = {
        **os.environ,
        **words,
        "_AGENTRL_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [Path(sys.executable).with_name("agentrl")], env=env, capture_output=True, text=True, check=False
    )
    assert "config" in done.stdout


def test_config_list_names_every_packaged_config_and_says_what_it_is() -> None:
    status, text = run("config", "list", "--json")
    found = json.loads(text)
    files = {
        path.relative_to(ROOT / "configs").with_suffix("").as_posix()
        for path in (ROOT / "configs").rglob("*.yaml")
    }
    assert status == 0
    assert {config["name"] for config in found} == files
    assert {config["name"] for config in found if config["is_whole"]} == {
        name for name in files if name.rpartition("/")[0] in ("", "recipes")
    }
    assert all(config["text"] for config in found)
    assert all(config["name"] in run("config", "list")[1] for config in found)


def test_pages_are_read_without_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rooms = {path.parent.name for path in (ROOT / "agentrl/extras").glob("*/README.md")}
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | rooms
    assert set(documentation.pages()) == pages
    assert run("docs") == (0, (ROOT / "docs/README.md").read_text() + "\n")
    assert run("docs", "docs/quickstart.md") == (0, (ROOT / "docs/quickstart.md").read_text() + "\n")
    done = CliRunner().invoke(app, ["docs", "quickstrat"])
    assert "no page 'quickstrat' in the documentation; did you mean quickstart" in str(done.exception)
    done = CliRunner().invoke(app, ["docs", "nothere"])
    assert str(done.exception).endswith(f"; the pages: {', '.join(sorted(pages))}")


def test_commands_that_prepare_are_printed_only_for_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_prepared(load_config("quickstart", ["trainer.prepared_by=[]"]))  # left to the readers of the files
    for name in ("warm_start/config.json", "data/train.parquet", "data/val.parquet"):
        file = tmp_path / "runs/quickstart" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    check_prepared(load_config("quickstart"))
