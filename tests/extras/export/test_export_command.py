"""`agentrl export`: what it refuses, in one line, before anything of a checkpoint runs."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.controller.checkpoint import FORMAT
from agentrl.data.checkpoint_files import BLOCK_BYTES
from agentrl.errors import CheckpointError, ConfigError
from agentrl.learner.stored_state import METADATA
from parts.stored_checkpoint import Opening, sign, write_base, write_checkpoint


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_checkpoint(write_base(tmp_path_factory.mktemp("base")), tmp_path_factory.mktemp("written"))


@pytest.fixture
def checkpoint(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "step_000001"))


def export(checkpoint: Path, *options: str):
    return CliRunner().invoke(app, ["export", str(checkpoint), str(checkpoint.parent / "out"), *options])


def test_metadata_that_run_a_command_are_refused_in_one_line(checkpoint, tmp_path):
    (checkpoint / "learner" / METADATA).write_bytes(pickle.dumps(Opening(tmp_path / "opened")))
    sign(checkpoint)
    error = export(checkpoint).exception
    assert isinstance(error, CheckpointError)
    assert len(str(error).splitlines()) == 1
    assert "it refers to posix.mkdir, which does not belong in a checkpoint" in str(error)
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("change", [{"trust_remote_code": True}, {"external_lib": "opened.py"}])
def test_code_that_a_checkpoint_names_runs_only_where_the_user_says_so(
    checkpoint, tmp_path, monkeypatch, change
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "opened.py").write_text("import os\nos.mkdir('opened')\n")
    file = checkpoint / "learner/model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    sign(checkpoint)
    error = export(checkpoint).exception
    assert isinstance(error, ConfigError)
    [key] = change
    assert f"model.{key}" in str(error)
    assert "--trust-remote-code" in str(error)
    assert not (tmp_path / "opened").exists()
    done = export(checkpoint, "--trust-remote-code")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "opened").exists() == ("external_lib" in change)


BROKEN_FILES = {
    "manifest.json": ["", "[]", "{}", '{"format": 2}', "[" * 100_000, '{"format": 1}'],
    "learner/model.json": ["", "[]", '{"dtype": 1}'],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in BROKEN_FILES.items() for text in texts]
)
def test_a_broken_file_of_a_checkpoint_is_told_in_one_line(checkpoint, name, text):
    (checkpoint / name).write_text(text)
    if name != "manifest.json":
        sign(checkpoint)
    error = export(checkpoint).exception
    assert isinstance(error, CheckpointError)
    assert "\n" not in str(error)


def test_what_was_meant_by_a_checkpoint_is_named(tmp_path):
    run = tmp_path / "run"
    for step in (1, 2):
        folder = run / f"checkpoints/step_{step:06d}"
        folder.mkdir(parents=True)
        manifest = {"format": FORMAT, "step": step, "version": step, "metric": None, "files": {}}
        (folder / "manifest.json").write_text(json.dumps({**manifest, "block_bytes": BLOCK_BYTES}))
    (run / "policy").mkdir()
    (run / "policy/config.json").touch()
    newest = run / "checkpoints/step_000002"
    for folder, also in ((run, f", or use {run}/policy, the exported policy"), (newest.parent, "")):
        text = str(CliRunner().invoke(app, ["export", str(folder), str(tmp_path / "out")]).exception)
        assert text == (
            f"{str(folder)!r} is not a checkpoint: it has no manifest.json; the newest is {newest}{also}"
        )
