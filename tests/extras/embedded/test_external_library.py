"""A library of the model and the embedded server."""

from pathlib import Path

import pytest
import torch

from agentrl.config.model import ModelConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.extras.embedded.__main__ import main as serve
from agentrl.servers.launch import launcher
from parts.hub import Repository, hub_with

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "qwen2"}',
    "tokenizer.json": b"{}",
    "model.safetensors": (2).to_bytes(8, "little") + b"{}",
    "run.py": b"x = 1",
}


def folder_of(path: Path, files=FILES) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


# -------------------------------------------------------------------------------------- a hub on this machine


@pytest.fixture
def hub(tmp_path):
    with hub_with({"team/tiny": Repository({"main": COMMIT}, {COMMIT: FILES})}, tmp_path) as hub:
        yield hub


def test_the_embedded_server_is_told_of_it_by_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_model.py").write_text("")
    made = launcher(RolloutConfig(), ModelConfig(external_lib="own_model.py"), api_key=None)
    command = made.command("m", weight_version="0", host="h", port=1)
    assert command[command.index("--external-lib") + 1] == str(tmp_path / "own_model.py")
    assert "--trust-remote-code" not in command
    trusted = launcher(
        RolloutConfig(backend="sglang"),
        ModelConfig(trust_remote_code=True, external_lib="own.module"),
        api_key=None,
    )
    assert "--trust-remote-code" in trusted.command("m", weight_version="0", host="h", port=1)


def test_a_library_that_is_missing_ends_the_server_with_one_line(tmp_path, capsys):
    folder, num_threads = folder_of(tmp_path / "model"), torch.get_num_threads()
    try:
        status = serve([str(folder), "--port", "0", "--external-lib", "no_such.py"])
    finally:
        torch.set_num_threads(num_threads)
    assert status == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: plugin file 'no_such.py' does not exist"
