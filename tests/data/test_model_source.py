"""Where a model comes from: a folder, or a hub id through a cache made by hand or a small hub on this
machine; never the network.
"""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from agentrl.config.model import ModelConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.config.schema import Config
from agentrl.config.supervised import SFTConfig
from agentrl.controller.start import open_run
from agentrl.data.model_source import find_tokenizer, resolve_model
from agentrl.errors import ConfigError
from agentrl.fleet.user_files import user_files
from agentrl.offline.supervised_loop import model_with_tokenizer
from agentrl.plugins.sources import import_source
from agentrl.serving.launch import launcher

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"
FILES = {
    "config.json": b'{"model_type": "qwen2"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
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
given = ModelConfig(**json.loads(sys.argv[1]))
try:
    found = resolve_model(given, with_weights=len(sys.argv) == 2)
    print(json.dumps([found.path, found.tokenizer_path]))
except ConfigError as error:
    print(json.dumps(str(error)))
"""


def resolve_in_process(model: dict, environment: dict, *flags: str):
    """The environment of huggingface_hub is read at its import: a process of its own."""
    clean = {
        "PATH": "/usr/bin:/bin",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(model), *flags],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def cache_with(path: Path, commit: str = COMMIT, files=FILES) -> dict:
    repository = path / "models--team--tiny"
    folder_of(repository / "snapshots" / commit, files)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(commit)
    return {"HF_HUB_CACHE": str(path), "HF_HUB_OFFLINE": "1"}


def test_a_hub_id_in_the_cache_becomes_its_folder_without_a_network(tmp_path):
    environment = cache_with(tmp_path)
    path, tokenizer = resolve_in_process({"path": "team/tiny", "tokenizer_path": "team/tiny"}, environment)
    assert path == tokenizer == str(tmp_path / "models--team--tiny/snapshots" / COMMIT)
    environment = cache_with(tmp_path, OTHER)
    assert resolve_in_process({"path": "team/tiny", "revision": COMMIT}, environment)[0] == path
    assert resolve_in_process({"path": "team/tiny"}, environment)[0].endswith(OTHER)


def test_offline_and_not_in_the_cache_is_one_clear_line(tmp_path):
    said = resolve_in_process({"path": "team/tiny"}, {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    assert said.startswith(
        "model.path='team/tiny' cannot be loaded: no such folder, and the hub cannot be reached"
    )
    assert "\n" not in said


def test_no_network_is_one_clear_line(tmp_path):
    said = resolve_in_process(
        {"path": "team/tiny"}, {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    )
    assert "the hub cannot be reached" in said


# -------------------------------------------------------------------------------------- a hub on this machine


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as a snapshot needs; `asked` are the files that were fetched."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        if self.path.startswith(("/api/models/team/tiny/revision/", "/api/models/team/tiny/tree/")):
            revision = self.path.split("/")[6].split("?")[0]
            if revision not in ("main", COMMIT):
                return self.answer(
                    404, b"{}", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no such revision"}
                )
            siblings = [{"rfilename": name} for name in FILES]
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": name}
                for name, content in FILES.items()
            ]
            described = (
                tree
                if "/tree/" in self.path
                else {"id": "team/tiny", "modelId": "team/tiny", "sha": COMMIT, "siblings": siblings}
            )
            return self.answer(200, json.dumps(described).encode(), {"Content-Type": "application/json"})
        name = self.path.rpartition("/")[2]
        if self.path.startswith(f"/team/tiny/resolve/{COMMIT}/") and name in FILES:
            if self.command == "GET":
                self.asked.append(name)
            return self.answer(200, FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        return self.answer(
            404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"}
        )

    do_HEAD = do_GET

    def answer(self, status: int, body: bytes, headers: dict) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def hub(tmp_path):
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_CACHE": str(tmp_path / "cache")}
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_describes_a_model_is_fetched_first_and_weights_when_they_are_needed(hub):
    path, _ = resolve_in_process({"path": "team/tiny"}, hub, "without weights")
    assert path.endswith(COMMIT)
    assert sorted(Hub.asked) == ["config.json", "tokenizer.json"]
    again, _ = resolve_in_process({"path": "team/tiny"}, hub)
    assert again == path
    assert sorted(Hub.asked) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (Path(path) / "model.safetensors").read_bytes() == b"weights"
    assert not (Path(path) / "run.py").exists(), "code of a model is not even fetched unless it may run"


def test_code_comes_along_where_it_may_run(hub):
    path, _ = resolve_in_process({"path": "team/tiny", "trust_remote_code": True}, hub)
    assert (Path(path) / "run.py").is_file()


def test_an_unknown_model_and_an_unknown_revision_are_told_apart(hub):
    assert "no such model on the hub" in resolve_in_process({"path": "team/other"}, hub)
    assert "the hub does not have revision 'v2'" in resolve_in_process(
        {"path": "team/tiny", "revision": "v2"}, hub
    )


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
    code = (
        "import sys, torch; from agentrl.config.model import ModelConfig; from agentrl.learner.model import "
        "load_module\n"
        "model = ModelConfig(path=sys.argv[1], external_lib=sys.argv[2] or None)\n"
        "print(type(load_module(model, 'sdpa', torch.float32, from_scratch=None)).__name__)"
    )
    for argument, expected in (
        (str(library), "OwnForCausalLM"),
        ("", "cannot be loaded as a causal language model"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder), argument], capture_output=True, text=True, check=False
        )
        assert expected in (done.stdout + done.stderr), done.stderr


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


def test_a_library_that_is_missing_ends_the_server_with_one_line(tmp_path):
    folder = folder_of(tmp_path / "model")
    program = [
        sys.executable,
        "-m",
        "agentrl.serving.embedded",
        str(folder),
        "--port",
        "0",
        "--external-lib",
        "no_such.py",
    ]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "error: plugin file 'no_such.py' does not exist",
    )


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
    config = Config.model_validate({"model": model, "trainer": {"run_dir": str(tmp_path / "run")}})
    with pytest.raises(ConfigError, match=f"^{message}"), open_run(config):
        pass
    assert not (tmp_path / "run").exists()


def test_supervised_training_refuses_float16():
    with pytest.raises(ConfigError, match=r"^model.dtype=float16 cannot be trained: "):
        model_with_tokenizer(SFTConfig.model_validate({"model": {"path": "anything", "dtype": "float16"}}))
