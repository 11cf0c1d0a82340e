"""Servers of opponents and a teacher: asked if they run, started if a run would start them."""

import shutil

import pytest

from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.config.schema import Config
from agentrl.extras.doctor import frozen
from agentrl.extras.doctor.subject import Subject
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.ports import ReservedPort
from agentrl.servers.supervisor import Supervisor
from parts.frozen import write_frozen
from parts.learner import write_tiny_model

VOCAB_SIZE = 384


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy, and a frozen model with its tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    write_tiny_model(folder / "policy", VOCAB_SIZE, **sizes)
    write_tiny_tokenizer(folder / "policy")
    write_frozen(folder / "policy", folder / "frozen")
    return folder


def diagnosed(policy, *, opponents=None, distillation=None, **rollout):
    values = {
        "model": {"path": str(policy)},
        "agent": {"opponents": opponents or {}},
        "algorithm": {"distillation": distillation or {}},
        "rollout": {"embedded": {"num_blocks": 8}, **rollout},
    }
    subject = Subject(Config.model_validate(values), is_given=True)
    return {own.part: own for own in frozen.diagnose(subject)}


def test_a_server_of_each_frozen_model_is_started_and_samples(models):
    own = {"model": {"path": str(models / "frozen")}, "num_servers": 3}
    found = diagnosed(
        models / "policy", opponents={"past": {"refresh_steps": 5}}, distillation={"servers": own}
    )
    keys = ("agent.opponents.past", "algorithm.distillation.servers")
    assert {part: one.verdict for part, one in found.items()} == dict.fromkeys(keys, "ok")
    assert all("starts in" in one.text and one.figures["start_s"] > 0 for one in found.values())


def test_a_model_that_no_server_loads_is_wrong_and_does_not_hide_the_others(models, tmp_path):
    for name in ("cut", "no_tensors"):
        shutil.copytree(models / "frozen", tmp_path / name)
    weights = next((tmp_path / "cut").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:100])
    (tmp_path / "no_tensors" / weights.name).write_bytes((2).to_bytes(8, "little") + b"{}")
    opponents = {name: {"model": {"path": str(tmp_path / name)}} for name in ("cut", "no_tensors")}
    found = diagnosed(models / "policy", opponents={**opponents, "far": {"model": {"path": "some/where"}}})
    assert found["agent.opponents.cut"].verdict == found["agent.opponents.no_tensors"].verdict == "wrong"
    assert f"{weights.name} is cut" in found["agent.opponents.cut"].text
    assert "its files lack 15 weights" in found["agent.opponents.no_tensors"].text
    assert found["agent.opponents.no_tensors"].cure.endswith("agent.opponents.no_tensors.model.path")
    assert (found["agent.opponents.far"].verdict, found["agent.opponents.far"].text) == (
        "ok",
        "its server was not started: model.path='some/where' is not on this machine",
    )


def test_another_tokenizer_and_a_missing_folder_are_wrong(models, tmp_path):
    shutil.copytree(models / "frozen", tmp_path / "other")
    tokenizer = tmp_path / "other" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|end|>"))
    (tmp_path / "empty").mkdir()
    opponents = {name: {"model": {"path": str(tmp_path / name)}} for name in ("other", "empty", "gone")}
    found = diagnosed(models / "policy", opponents=opponents)
    assert {one.verdict for one in found.values()} == {"wrong"}
    assert "gone' cannot be loaded: no such folder" in found["agent.opponents.gone"].text
    assert "has another tokenizer than the policy: token" in found["agent.opponents.other"].text
    assert "empty" in found["agent.opponents.empty"].text


def test_servers_that_run_are_asked(models, tmp_path):
    launcher = EmbeddedServer(EmbeddedServerConfig(num_blocks=8), "float32")
    server = Supervisor(launcher, log_file=tmp_path / "log", start_timeout_s=240, max_restarts=0)
    try:
        url = server.start(str(models / "frozen"), "default")
        with ReservedPort() as port:
            nobody = f"http://127.0.0.1:{port.number}"
            opponents = {
                "a": {"urls": [url]},
                "b": {"urls": [nobody]},
                "c": {"urls": [url], "api_key_env": "NO_KEY"},
            }
            local = diagnosed(models / "policy", opponents=opponents)
            elsewhere = diagnosed("hub/policy", opponents=opponents)
    finally:
        server.stop()
    assert local[f"agent.opponents.a {url}"].verdict == "ok"
    assert "embedded agentrl-" in local[f"agent.opponents.a {url}"].text
    assert local["agent.opponents.b"].verdict == local["agent.opponents.c"].verdict == "wrong"
    assert "does not answer" in local["agent.opponents.b"].text
    assert "NO_KEY" in local["agent.opponents.c"].text
    # Without the policy's folder there is nothing to compare tokenizers with.
    verdicts = {part.split()[0]: one.verdict for part, one in elsewhere.items()}
    assert verdicts == {"agent.opponents.a": "ok", "agent.opponents.b": "wrong", "agent.opponents.c": "wrong"}


def test_sglang_is_looked_for_unless_the_check_of_the_policys_servers_does(models):
    opponents = {"frozen": {"model": {"path": str(models / "frozen")}}}
    sglang = {"backend": "sglang", "sglang": {"python": "/no/such/python"}}
    assert diagnosed(models / "policy", opponents=opponents, **sglang) == {}
    found = diagnosed(models / "policy", opponents=opponents, urls=["http://127.0.0.1:1"], **sglang)
    assert [(part, one.verdict) for part, one in found.items()] == [("SGLang", "wrong")]


def test_a_run_without_frozen_models_has_no_lines(models):
    assert diagnosed(models / "policy") == {}
