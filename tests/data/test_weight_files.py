"""The weights of a folder are checked by names, sizes and headers, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from agentrl.config.model import ModelConfig
from agentrl.data.model_source import find_model
from agentrl.data.weight_files import INDEX, SINGLE, check_weights, read_entries
from agentrl.errors import ConfigError


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(5, np.float16)}, folder / SINGLE)
    return folder


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        find_model(ModelConfig(path=str(folder)))
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"model.path={str(folder)!r}: ")


def test_a_header_by_hand(tmp_path):
    file = model(tmp_path / "m") / SINGLE
    found = read_entries(file)
    assert {name: (one.dtype, one.shape, one.end - one.begin) for name, one in found.items()} == {
        "a": ("F32", (2, 3), 24),
        "b": ("F16", (5,), 10),
    }
    assert max(one.end for one in found.values()) == file.stat().st_size


def test_weights_that_are_not_there_or_cut(tmp_path):
    folder = model(tmp_path / "m")
    assert find_model(ModelConfig(path=str(folder))) == folder
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(whole[:-4])
    assert (
        refused(folder)
        == f"{folder / SINGLE} is cut: it has {len(whole) - 4} of {len(whole)} bytes; copy it again"
    )
    (folder / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "is cut, or is no safetensors file" in refused(folder)
    (folder / SINGLE).write_bytes(b"")
    assert "copy it again" in refused(folder)
    (folder / SINGLE).unlink()
    assert refused(folder) == "it has no weights: there is no *.safetensors in it"
    assert find_model(ModelConfig(path=str(folder)), with_weights=False) == folder
    (folder / "pytorch_model.bin").touch()
    check_weights(folder)  # transformers reads it


def test_every_shard_of_an_index_is_looked_at(tmp_path):
    folder = model(tmp_path / "m")
    (folder / SINGLE).rename(folder / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}
    (folder / INDEX).write_text(json.dumps(index))
    assert refused(folder) == f"{folder} lacks 1 of the 2 files that {INDEX} names: two.safetensors"
    (folder / "two.safetensors").write_bytes((folder / "one.safetensors").read_bytes()[:50])
    assert f"{folder / 'two.safetensors'} is cut" in refused(folder)
