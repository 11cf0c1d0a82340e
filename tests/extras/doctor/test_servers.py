"""Servers that a config names: what they say of themselves, and whether they have the config's weights."""

import pytest
import trio
from safetensors.torch import load_file, save_file

import agentrl
from agentrl.config.rollout import EmbeddedServerConfig, RolloutConfig, WeightsConfig
from agentrl.config.schema import Config
from agentrl.extras.doctor import servers
from agentrl.extras.doctor.publish import PublishSpeed, judge_publish
from agentrl.extras.doctor.servers import ServerFacts
from agentrl.extras.doctor.subject import Subject
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.ports import ReservedPort
from agentrl.servers.supervisor import Supervisor
from parts.clients import talk
from parts.learner import write_tiny_model

VOCAB_SIZE = 384


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models with the same shapes and other random weights."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    for name in ("own", "other"):
        write_tiny_model(folder / name, VOCAB_SIZE, **sizes)
    file = folder / "other" / "model.safetensors"
    save_file({key: -value for key, value in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def url(models, tmp_path_factory):
    """A server with the weights of `own`, which no run has published to."""
    log_file = tmp_path_factory.mktemp("log") / "server.log"
    launcher = EmbeddedServer(EmbeddedServerConfig(num_blocks=8), "float32")
    server = Supervisor(launcher, log_file=log_file, start_timeout_s=240, max_restarts=0)
    try:
        yield server.start(str(models / "own"), "default")
    finally:
        server.stop()


def diagnosed(model, *urls, **rollout):
    config = Config(rollout=RolloutConfig(urls=urls, **rollout))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(model)})})
    return {own.part: own for own in servers.diagnose(Subject(config, is_given=True))}


def test_a_server_with_the_weights_of_the_config_is_ok(models, url):
    found = diagnosed(models / "own", url)
    assert {own.verdict for own in found.values()} == {"ok"}, found
    assert f"embedded agentrl-{agentrl.__version__}, 1 rank, float32" in found[f"server {url}"].text
    assert found[f"server {url} weights"].figures["logprob_difference"] < 1e-4


def test_a_server_with_other_weights_is_wrong(models, url):
    found = diagnosed(models / "other", url)
    assert found[f"server {url}"].verdict == "ok"
    weights = found[f"server {url} weights"]
    assert weights.verdict == "wrong"
    assert weights.figures["logprob_difference"] > 0.1
    assert str(models / "own") in weights.cure


def test_what_a_run_has_published_is_not_compared(models, url):
    async def name_version(client):
        await client.update_weight_version(7)

    talk(name_version, url)
    found = diagnosed(models / "other", url)[f"server {url} weights"]
    assert (found.verdict, "version 7" in found.text) == ("ok", True)


def test_nobody_there_is_wrong_and_does_not_hide_the_others(models, url):
    with ReservedPort() as port:
        nobody = f"http://127.0.0.1:{port.number}"
        found = diagnosed("/no/model", nobody, url)
    assert found[f"server {nobody}"].verdict == "wrong"
    assert found[f"server {url}"].verdict == "ok"


def test_a_paused_server_is_wrong(models, url):
    async def script(client):
        await client.pause("abort")
        return await trio.to_thread.run_sync(diagnosed, models / "own", url)

    found = talk(script, url)[f"server {url}"]
    assert found.verdict == "wrong"
    assert "/continue_generation" in found.cure


FACTS = ServerFacts(
    "http://127.0.0.1:1", "embedded", f"agentrl-{agentrl.__version__}", 1, "float32", "m", None, False
)


@pytest.mark.parametrize(
    ("kind", "host", "transport", "verdict"),
    [
        ("sglang", "127.0.0.1", "tensor", "ok"),
        ("sglang", "node1", "tensor", "wrong"),
        ("embedded", "127.0.0.1", "tensor", "wrong"),
        ("embedded", "127.0.0.1", "distributed", "ok"),
    ],
)
def test_the_transport_must_reach_the_server(kind, host, transport, verdict):
    facts = ServerFacts(f"http://{host}:1", kind, FACTS.version, 4, None, "m", None, False)
    rollout = RolloutConfig(urls=("http://127.0.0.1:1",), weights=WeightsConfig(transport=transport))
    assert servers.judge_server(facts, rollout).verdict == verdict


def test_an_embedded_server_of_another_agentrl_is_told():
    facts = ServerFacts("http://127.0.0.1:1", "embedded", "agentrl-0.0.1", 1, None, "m", None, False)
    assert servers.judge_server(facts, RolloutConfig()).verdict == "slow"


def test_sglang_is_looked_for_where_it_would_be_started():
    found = servers.judge_sglang("/no/such/python")
    assert (found.verdict, "rollout.sglang.python" in found.cure) == ("wrong", True)


def test_a_publish_is_judged_by_its_rate_and_told_at_the_size_of_the_model():
    fast, slow = PublishSpeed(64_000_000, 0.5), PublishSpeed(64_000_000, 2.0)
    found = judge_publish(fast, transport="disk", num_bytes=15_000_000_000)
    assert (found.verdict, "15.0 GB take about 117 s" in found.text) == ("ok", True)
    assert judge_publish(slow, transport="disk", num_bytes=None).verdict == "slow"
    assert judge_publish(PublishSpeed(800_000, 1.0), transport="disk", num_bytes=None).verdict == "ok"
    assert "take about" not in judge_publish(fast, transport="disk", num_bytes=1000).text
