"""An export from object storage into object storage."""

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.extras.storage.fetched import fetched_folder
from agentrl.extras.storage.storage import StoragePath
from parts.stored_checkpoint import write_base, write_checkpoint


def same_weights(left, right):
    ours, theirs = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    assert list(ours) == list(theirs)
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_export_from_storage_into_storage_is_the_same(tmp_path, s3):
    checkpoint = write_checkpoint(write_base(tmp_path / "base"), tmp_path / "checkpoints")
    policy = tmp_path / "policy"
    assert CliRunner().invoke(app, ["export", str(checkpoint), str(policy)]).exit_code == 0
    place = StoragePath.of(f"{s3.url}/step_000001")
    for path in [path for path in checkpoint.rglob("*") if path.is_file()]:
        (place / str(path.relative_to(checkpoint))).upload(path)
    arguments = ["export", f"{s3.url}/step_000001", f"{s3.url}/out"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert same_weights(fetched_folder(f"{s3.url}/out"), policy)
    assert "exists and is not empty" in str(CliRunner().invoke(app, arguments).exception)
    shard = next(name for name in place.files() if name.endswith(".distcp"))
    (place / shard).write(b"another")
    (place / "manifest.json").write((place / "manifest.json").read() + b" ")  # else the local copy is used
    assert f"{shard} is damaged" in str(CliRunner().invoke(app, [*arguments[:2], "out"]).exception)
    (place / "manifest.json").delete()
    assert "it has no manifest.json" in str(CliRunner().invoke(app, [*arguments[:2], "out"]).exception)
