"""A run that has ended says so before anything starts; one that goes on says from where."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import agentrl
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.controller import train
from agentrl.controller.checkpoint import Checkpoint
from agentrl.controller.resume import say_resumed
from agentrl.controller.run import complete_result
from agentrl.data.checkpoint_files import BLOCK_BYTES, FORMAT
from agentrl.types import BufferCounts

COUNTS = BufferCounts(drawn=6, queued=0, leased=0, ready=2, consumed=4, dropped={}, discarded={"late": 1})


def ended(folder: Path, *, step: int = 20, saved: int = 20) -> TrainerConfig:
    checkpoint = folder / f"checkpoints/step_{saved:06d}"
    checkpoint.mkdir(parents=True)
    manifest = {"format": FORMAT, "step": saved, "version": saved, "metric": None, "files": {}}
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "block_bytes": BLOCK_BYTES}))
    (folder / "policy").mkdir()
    (folder / "policy/config.json").touch()
    result = {"step": step, "version": 21, "counts": asdict(COUNTS), "balanced": True, "validation": {}}
    (folder / "result.json").write_text(json.dumps(result))
    return TrainerConfig(run_dir=str(folder), steps=20)


@pytest.mark.parametrize("steps", [20, 8])
def test_it_is_said_at_once(steps, tmp_path, capsys, monkeypatch):
    trainer = ended(tmp_path / "run").model_copy(update={"steps": steps})

    def open_run(config: Config) -> None:
        raise AssertionError("nothing is started")

    monkeypatch.setattr(train, "open_run", open_run)
    result = agentrl.train(Config(trainer=trainer))
    assert (result.step, result.version, result.counts) == (20, 21, COUNTS)
    assert result.model_path == tmp_path / "run/policy"
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"this run is complete (20 of {steps} steps): its policy is in {tmp_path}/run/policy; "
    )


@pytest.mark.parametrize(
    "changes", [{"steps": 21}, {"resume_mode": "disable"}, {"val_only": True}, {"steps": None}], ids=str
)
def test_a_run_that_has_something_to_do_is_opened(changes, tmp_path):
    assert complete_result(ended(tmp_path / "run").model_copy(update=changes)) is None


def test_what_did_not_end_is_opened(tmp_path):
    assert complete_result(TrainerConfig(run_dir=str(tmp_path / "new"), steps=20)) is None
    went_on = ended(tmp_path / "went_on", step=20, saved=30)  # and was interrupted
    assert complete_result(went_on) is None
    torn = ended(tmp_path / "torn")
    (tmp_path / "torn/result.json").write_text('{"step": 20')
    assert complete_result(torn) is None
    unwritten = ended(tmp_path / "unwritten")
    (tmp_path / "unwritten/policy/config.json").unlink()
    assert complete_result(unwritten) is None


@pytest.mark.parametrize("path", ["first", "other"])
def test_a_resumed_run_says_whose_weights_it_continues(path, tmp_path):
    folder = tmp_path / "step_000004"
    (folder / "learner").mkdir(parents=True)
    (folder / "learner/model.json").write_text(ModelConfig(path=str(tmp_path / "first")).model_dump_json())
    (tmp_path / "first").mkdir()
    said: list[str] = []
    config = Config(model=ModelConfig(path=str(tmp_path / path)))
    say_resumed(Checkpoint(folder, 4, 6, None), config, total_steps=9, say=said.append)
    about_model = (
        f"model.path='{tmp_path}/other' has no effect on the weights: they continue from step_000004, saved "
        f"under model.path='{tmp_path}/first'; to begin with others, choose another trainer.run_dir"
    )
    assert said == ["resumed from step_000004", *([about_model] if path == "other" else [])]
