"""A real SGLang that begins with dummy weights: every transport brings it to the learner's, cast, under its
fused names, and checked.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import WeightsConfig
from agentrl.errors import ServerError
from agentrl.learner.learner import LearnerSpec
from agentrl.serving.supervisor import Supervisor
from agentrl.types import SamplingParams
from agentrl.weights.publish import Publisher
from agentrl.weights.transport import LearnerCalls
from agentrl.weights.verify import Verifier, policy_logprobs
from agentrl.workers.workers import LocalWorker
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
    launcher = sglang_on_cpu(skip_tokenizer_init=True, max_total_tokens=2048, load_format="dummy")
    supervisor = Supervisor(
        launcher, log_file=tmp_path_factory.mktemp("log") / "log", start_timeout_s=400, max_restarts=0
    )
    yield supervisor.start(learner.path, "default")
    supervisor.stop()


def publisher(learner, folder, **options):
    config = WeightsConfig(verify=True, bucket_bytes=16384, **options)
    return Publisher(learner.workers, config, folder=folder, pause_mode="retract")


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
