"""A run whose machine is lost goes on elsewhere, from object storage alone; every group is accounted for."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.data.trajectories import decode, read_parquet
from agentrl.extras.storage.sent import send_folder
from agentrl.extras.storage.storage import StoragePath
from agentrl.extras.storage.uploaded import read_upload

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 7


def test_a_run_goes_on_in_another_folder_after_its_machine_is_lost(world, s3, tmp_path, monkeypatch):
    """kill -9 of all processes and the loss of the folder; data and model are in storage as well."""
    place = StoragePath.of(f"{s3.url}/run")
    send_folder(world.folder / "model", StoragePath.of(f"{s3.url}/model"))
    StoragePath.of(f"{s3.url}/train.parquet").upload(world.folder / "data/train.parquet")
    command = (
        "train",
        str(world.config),
        "trainer.run_dir=run",
        f"trainer.upload_to={place.url}",
        "trainer.upload_interval_s=0.2",
        "trainer.save_freq=1",
        f"trainer.steps={STEPS}",
        "buffer.max_staleness=2",
        f"data.train_files=[{s3.url}/train.parquet]",
        f"model.path={s3.url}/model",
    )
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    first = world.start(*command)
    first.wait_until(lambda: (index := read_upload(place)) is not None and (index.step or 0) >= 2, 500)
    first.kill()
    shutil.rmtree(here / "run")
    uploaded = read_upload(place).step
    assert 2 <= uploaded < STEPS

    monkeypatch.chdir(there)
    second = world.start(*command)
    assert second.wait(700) == 0, second.output()
    assert f"fetching step_{uploaded:06d}" in second.output()
    assert f"resumed from step_{uploaded:06d}" in second.output()
    assert "the journal belongs to other data" not in second.output()

    copy = tmp_path / "copy"
    assert CliRunner().invoke(app, ["fetch", place.url, str(copy)]).exit_code == 0
    for folder in (there / "run", copy):
        audited = CliRunner().invoke(app, ["audit", str(folder)])
        assert audited.exit_code == 0, audited.output
        records = world.records(folder).train
        assert [record["step"] for record in records] == list(range(1, STEPS + 1)), "each step once"
        assert all(record["rollout/lag/max"] <= 2 for record in records)
        versions = [
            json.loads(line)["version"] for line in (folder / "versions.jsonl").read_text().splitlines()
        ]
        assert versions == sorted(set(versions)), "a version was used twice"
        result = json.loads((folder / "result.json").read_text())
        assert result["balanced"]
        assert result["counts"]["consumed"] == STEPS * 4
    groups = [
        group_id
        for step in range(1, STEPS + 1)
        for group_id in {
            t.group_id for t in decode(read_parquet(copy / f"trajectories/step_{step:06d}.parquet"))
        }
    ]
    assert len(groups) == len(set(groups)) == STEPS * 4, "a group was trained on twice"
    assert (copy / "policy/model.safetensors").read_bytes() == (
        there / "run/policy/model.safetensors"
    ).read_bytes()
