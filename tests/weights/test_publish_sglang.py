"""A real SGLang that begins with dummy weights: every transport brings it to the learner's, cast, under its
fused names, and checked.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import WeightsConfig
from agentrl.errors import ServerError
from agentrl.learner.learner import LearnerSpec
from agentrl.servers.client import SGLangClient
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from agentrl.weights.publish import Publisher
from agentrl.weights.transport import LearnerCalls
from agentrl.weights.verify import Verifier, policy_logprobs
from parts.clients import talk
from parts.learner import lone_learner, update_once, write_tiny_model
from sglang_cpu.server import sglang_on_cpu

pytestmark = pytest.mark.sglang
VOCABULARY = 300
PROMPT = [5, 17, 42]


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learner")
    write_tiny_model(folder, VOCABULARY, max_position_embeddings=512, eos_token_id=1, pad_token_id=0)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2))
    spec = LearnerSpec(ModelConfig(path=str(folder)), config, AlgorithmConfig(), "decoupled", 3, 1.0, 20)
    with lone_learner(spec) as one:
        yield SimpleNamespace(one=one, path=str(folder), workers=LocalWorker(one))


@pytest.fixture(scope="module")
def url(learner, tmp_path_factory):
    launcher = sglang_on_cpu(
        skip_tokenizer_init=True, max_total_tokens=2048, load_format="dummy", loads_changes=True
    )
    supervisor = Supervisor(
        launcher, log_file=tmp_path_factory.mktemp("log") / "log", start_timeout_s=400, max_restarts=0
    )
    yield supervisor.start(learner.path, "default")
    supervisor.stop()


def publisher(learner, folder, **options):
    config = WeightsConfig(verify=True, bucket_bytes=16384, **options)
    return Publisher(learner.workers, config, folder=folder, pause_mode="retract")


def change_few(learner):
    """Change three elements of every weight."""
    with torch.no_grad():
        for name, tensor in learner.one._policy.tensors.items():
            torch.manual_seed(sum(map(ord, name)))
            tensor.view(-1)[torch.randperm(tensor.numel())[:3]] += 1.0


async def without_loader(client):
    """Return what the server says of itself, as if it had been started without the loader of changes."""
    return {**await SGLangClient.server_info(client), "custom_weight_loader": None}


def verifier(learner):
    return Verifier(LearnerCalls(learner.workers), False, 1.0)


def test_dummy_weights_are_told_from_the_learners(learner, url):
    async def script(client):
        await client.update_weight_version(0)
        with pytest.raises(ServerError, match="tensors differ"):
            await verifier(learner).sums_agree(client)
        with pytest.raises(ServerError, match="does not have the weights of version 0"):
            await verifier(learner).samples_agree(client, 0)

    talk(script, url)


OPTIONS = {
    "disk": {"transport": "disk"},
    "delta": {"transport": "disk", "delta": True},
    "distributed": {"transport": "distributed"},
    "tensor": {"transport": "tensor"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_transport_brings_the_learners_weights(learner, url, tmp_path, name):
    async def script(client):
        publish, versions = publisher(learner, tmp_path, **OPTIONS[name]), []
        for version in (1, 2):
            update_once(learner.one, VOCABULARY)
            report = await publish.publish(version, [client])
            assert dict(report.failed) == dict(report.repaired) == {}
            # The check of `publish` was by checksums; what cannot be summed up is checked by what it samples.
            assert await verifier(learner).sums_agree(client)
            await verifier(learner).samples_agree(client, version)
            versions.append(report)
        sampled = await client.generate(PROMPT, SamplingParams(20), rid="sampled")
        await publish.transport.close([client])
        return sampled, versions

    sampled, reports = talk(script, url)
    own = policy_logprobs(learner.workers, PROMPT, sampled.token_ids.tolist())
    np.testing.assert_allclose(sampled.logprobs, own, atol=1e-4)
    assert set(sampled.versions.tolist()) == {2}
    assert all(report.num_bytes > 0 for report in reports)


@pytest.mark.parametrize("has_loader", [True, False])
def test_few_changed_elements_are_all_that_a_server_with_the_loader_reads(
    learner, url, tmp_path, monkeypatch, has_loader
):
    async def script(client):
        if not has_loader:
            monkeypatch.setattr(client, "server_info", partial(without_loader, client))
        publish, reports = publisher(learner, tmp_path, transport="disk", delta=True), []
        for version in (1, 2, 3):
            change_few(learner)
            reports.append(await publish.publish(version, [client]))
            assert dict(reports[-1].failed) == dict(reports[-1].repaired) == {}
            assert await verifier(learner).sums_agree(client)
            await verifier(learner).samples_agree(client, version)
        return [report.num_bytes for report in reports]

    whole, *deltas = talk(script, url)
    assert all(size < whole / 2 if has_loader else size > 0.9 * whole for size in deltas), deltas


def test_a_server_that_lost_its_weights_gets_all_of_them(learner, url, tmp_path):
    """It has another version than the changes apply to."""

    async def script(client):
        publish = publisher(learner, tmp_path, transport="disk", delta=True)
        first = await publish.publish(1, [client])
        await client.update_weights_from_disk(learner.path, version=7, flush_cache=True)
        change_few(learner)
        report = await publish.publish(2, [client])
        assert await verifier(learner).sums_agree(client)
        return first, report

    first, report = talk(script, url)
    assert dict(report.failed) == {}
    assert report.num_bytes == first.num_bytes
