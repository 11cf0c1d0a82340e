"""Where a model comes from: a folder, or a hub id through a cache made by hand or a small hub on this
machine; never the network.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from agentrl.cluster.user_files import user_files
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.controller.start import open_run
from agentrl.data.model_source import find_tokenizer, resolve_model
from agentrl.errors import ConfigError
from agentrl.plugins.sources import import_source
from parts.hub import Repository, ask_in_process, hub_with
from parts.played_server import played_sglang

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"
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


# ----------------------------------------------------------------------------------------------------- folder


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    model = ModelConfig(path=str(folder_of(tmp_path / "model")))
    assert resolve_model(model) == model


def test_a_relative_folder_is_found_from_any_working_directory(tmp_path, monkeypatch):
    folder_of(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    model = ModelConfig(path="model")
    assert resolve_model(model).path == str(tmp_path / "model")


def test_a_tokenizer_is_enough_where_the_model_is_served_elsewhere(tmp_path):
    folder = str(folder_of(tmp_path / "tokenizer", {"tokenizer.json": b"{}"}))
    assert resolve_model(ModelConfig(path=folder), with_weights=False).path == folder
    served = ModelConfig(path="/on/the/server", tokenizer_path=folder)
    assert resolve_model(served, with_weights=False) == served


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", r"model\.path is empty; set it to the folder of a model"),
        (
            "/no/such/model",
            r"model\.path='/no/such/model' cannot be loaded: no such folder, and not a hub id",
        ),
        ("./policy", r"no such folder, and not a hub id"),
        ("a/b/c", r"no such folder, and not a hub id"),
    ],
)
def test_what_is_neither_folder_nor_hub_id_is_one_clear_line(path, why):
    with pytest.raises(ConfigError, match=why):
        resolve_model(ModelConfig(path=path))


def test_a_folder_without_a_config_is_no_model(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(ModelConfig(path=str(tmp_path)))


# ----------------------------------------------------------------------------------- cache, without a network

RESOLVE = """
import json, sys
from agentrl.config.model import ModelConfig
from agentrl.data.model_source import resolve_model
from agentrl.errors import ConfigError

def resolve(model):
    try:
        found = resolve_model(ModelConfig(**model), with_weights=len(sys.argv) == 2)
        return [found.path, found.tokenizer_path]
    except ConfigError as error:
        return str(error)

print(json.dumps([resolve(model) for model in json.loads(sys.argv[1])]))
"""


def resolve_in_process(environment: Mapping[str, str], *models: dict, flags: Sequence[str] = ()) -> list:
    return ask_in_process(RESOLVE, environment, json.dumps(models), *flags)


def cache_with(path: Path, commit: str = COMMIT, files=FILES) -> dict:
    repository = path / "models--team--tiny"
    folder_of(repository / "snapshots" / commit, files)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(commit)
    return {"HF_HUB_CACHE": str(path), "HF_HUB_OFFLINE": "1"}


def test_a_hub_id_in_the_cache_becomes_its_folder_without_a_network(tmp_path):
    tiny = {"path": "team/tiny"}
    (first,) = resolve_in_process(cache_with(tmp_path), {**tiny, "tokenizer_path": "team/tiny"})
    assert first == [str(tmp_path / "models--team--tiny/snapshots" / COMMIT)] * 2
    older, newest = resolve_in_process(cache_with(tmp_path, OTHER), {**tiny, "revision": COMMIT}, tiny)
    assert older[0] == first[0]
    assert newest[0].endswith(OTHER)


def test_offline_and_not_in_the_cache_is_one_clear_line(tmp_path):
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    (said,) = resolve_in_process(environment, {"path": "team/tiny"})
    assert said.startswith(
        "model.path='team/tiny' cannot be loaded: no such folder, and the hub cannot be reached"
    )
    assert "\n" not in said


def test_no_network_is_one_clear_line(tmp_path):
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    (said,) = resolve_in_process(environment, {"path": "team/tiny"})
    assert "the hub cannot be reached" in said


# -------------------------------------------------------------------------------------- a hub on this machine


@pytest.fixture
def hub(tmp_path):
    with hub_with({"team/tiny": Repository({"main": COMMIT}, {COMMIT: FILES})}, tmp_path) as hub:
        yield hub


def test_what_describes_a_model_is_fetched_first_and_weights_when_they_are_needed(hub):
    tiny = {"path": "team/tiny"}
    ((path, _),) = resolve_in_process(hub.environment, tiny, flags=["without weights"])
    assert path.endswith(COMMIT)
    assert sorted(hub.asked) == ["config.json", "tokenizer.json"]
    ((again, _),) = resolve_in_process(hub.environment, tiny)
    assert again == path
    assert sorted(hub.asked) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(path) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not (Path(path) / "run.py").exists(), "code of a model is not even fetched unless it may run"


def test_code_comes_along_where_it_may_run(hub):
    trusted = {"path": "team/tiny", "trust_remote_code": True}
    ((path, _),) = resolve_in_process(hub.environment, trusted)
    assert (Path(path) / "run.py").is_file()


def test_an_unknown_model_and_an_unknown_revision_are_told_apart(hub):
    unknown = {"path": "team/tiny", "revision": "v2"}
    no_model, no_revision = resolve_in_process(hub.environment, {"path": "team/other"}, unknown)
    assert "no such model on the hub" in no_model
    assert "the hub does not have revision 'v2'" in no_revision


def test_a_tokenizer_is_found_as_a_model_is(tmp_path):
    folder = folder_of(tmp_path / "tokenizer", {"tokenizer.json": b"{}"})
    assert find_tokenizer(str(folder)) == folder
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path='/no/such' cannot be loaded"):
        find_tokenizer("/no/such")


# ----------------------------------------------------------------------------------------------- external_lib

LIBRARY = """
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "agentrl_test_own"

class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig

AutoConfig.register("agentrl_test_own", OwnConfig, exist_ok=True)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM, exist_ok=True)
"""

LOAD = """
import sys
import torch
from agentrl.config.model import ModelConfig
from agentrl.errors import ConfigError
from agentrl.learner.model import outline_module

for library in (None, sys.argv[2]):
    model = ModelConfig(path=sys.argv[1], external_lib=library)
    try:
        found = outline_module(model, "sdpa", torch.float32, from_scratch=None)
        print(type(found.module).__name__)
    except ConfigError as error:
        print(error)
"""


def test_a_library_registers_the_model_before_it_is_loaded(tmp_path):
    library = tmp_path / "own_model.py"
    library.write_text(LIBRARY)
    folder = tmp_path / "model"
    module = import_source(str(library))
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    module.OwnForCausalLM(module.OwnConfig(**sizes, intermediate_size=8)).save_pretrained(folder)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), str(library)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cannot be loaded as a causal language model" in done.stdout
    assert done.stdout.splitlines()[-1] == "OwnForCausalLM"


def test_a_library_travels_with_the_run(tmp_path):
    assert user_files(Config(model=ModelConfig(external_lib="own_model.py"))) == ["own_model.py"]
    assert user_files(Config(model=ModelConfig(external_lib="own.module"))) == []
    judge = {
        "reward_model": {"model": {"path": "m", "external_lib": "judge.py"}},
        "reward": {"terms": {"reward_model": {}}},
    }
    assert user_files(Config.model_validate(judge)) == ["judge.py"]


@pytest.mark.parametrize(
    ("kind", "dtype", "message"),
    [
        (AutoModelForCausalLM, "float16", "model.dtype=float16 cannot be trained: "),
        (
            AutoModelForSequenceClassification,
            "bfloat16",
            r"model.path='.*' is a Qwen2ForSequenceClassification, which has no head over",
        ),
    ],
)
def test_a_policy_that_cannot_be_trained_is_refused_before_anything_starts(tmp_path, kind, dtype, message):
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    kind.from_config(Qwen2Config(**sizes, intermediate_size=8)).save_pretrained(tmp_path / "model")
    model = {"path": str(tmp_path / "model"), "dtype": dtype}
    sections = {"model": model, "rollout": played_sglang(), "trainer": {"run_dir": str(tmp_path / "run")}}
    with pytest.raises(ConfigError, match=f"^{message}"), open_run(Config.model_validate(sections)):
        pass
    assert not (tmp_path / "run").exists()
