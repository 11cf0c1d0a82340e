"""A real SGLang with experts: it follows every update, by each transport, and says which experts computed a
token.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agentrl.cluster.workers import LocalWorker
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import WeightsConfig
from agentrl.learner.batch import Sample
from agentrl.learner.packing import pack
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from agentrl.weights.publish import Publisher
from agentrl.weights.transport import LearnerCalls
from agentrl.weights.verify import Verifier, policy_logprobs
from parts.clients import talk
from parts.experts import VOCABULARY, write_experts
from parts.learner import learner_spec, lone_learner, update_once
from sglang_cpu.server import sglang_on_cpu

pytestmark = pytest.mark.sglang
PROMPT = [5, 17, 42]
SAMPLED = SamplingParams(20, ignore_eos=True, experts_from=0)
TRANSPORTS = {
    "disk": {"transport": "disk"},
    "delta": {"transport": "disk", "delta": True},
    "distributed": {"transport": "distributed"},
    "tensor": {"transport": "tensor"},
}


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learner")
    write_experts(folder, is_tied=False)  # SGLang does not tie the embeddings of mixtures of experts
    with lone_learner(learner_spec(ModelConfig(path=str(folder)), temperature=1.0)) as one:
        yield SimpleNamespace(one=one, path=folder, workers=LocalWorker(one))


@pytest.fixture(scope="module")
def url(learner, tmp_path_factory):
    launcher = sglang_on_cpu(
        skip_tokenizer_init=True,
        max_total_tokens=2048,
        enable_return_routed_experts=True,
        loads_changes=True,
    )
    supervisor = Supervisor(
        launcher, log_file=tmp_path_factory.mktemp("log") / "log", start_timeout_s=400, max_restarts=0
    )
    yield supervisor.start(str(learner.path), "0")
    supervisor.stop()


def publisher(learner, folder, **options):
    config = WeightsConfig(verify=True, bucket_bytes=16384, **options)
    return Publisher(learner.workers, config, folder=folder, pause_mode="retract", model=learner.path)


def change_experts(learner):
    """Add to a quarter of the elements of all experts of both layers, and to nothing else."""
    with torch.no_grad():
        for name, tensor in learner.one._policy.tensors.items():
            if ".experts." in name:
                tensor += 0.1 * torch.randn_like(tensor) * (torch.rand_like(tensor) < 0.25)


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_brings_the_experts(learner, url, tmp_path, name):
    torch.manual_seed(0)

    async def script(client):
        publish, versions = publisher(learner, tmp_path, **TRANSPORTS[name]), []
        for version in (1, 2):
            if version == 1:
                update_once(learner.one, VOCABULARY)
            else:
                change_experts(learner)
            before = await client.generate(PROMPT, SAMPLED, rid=f"before{version}")
            report = await publish.publish(version, [client])
            assert dict(report.failed) == dict(report.repaired) == {}
            await Verifier(LearnerCalls(learner.workers), False, 1.0).samples_agree(client, version)
            versions.append((before, await client.generate(PROMPT, SAMPLED, rid=f"after{version}")))
        await publish.transport.close([client])
        return versions

    for number, (before, after) in enumerate(talk(script, url), 1):
        assert set(after.versions.tolist()) == {number}
        if number == 2:  # only experts changed: stale ones would be seen
            own = policy_logprobs(learner.workers, PROMPT, before.token_ids.tolist())
            assert np.abs(np.array(own) - before.logprobs).max() > 1e-2
            own = policy_logprobs(learner.workers, PROMPT, after.token_ids.tolist())
            np.testing.assert_allclose(after.logprobs, own, atol=1e-4)


def test_the_learner_replays_its_experts(learner, url, tmp_path):
    async def script(client):
        publish = publisher(learner, tmp_path)
        assert dict((await publish.publish(9, [client])).failed) == {}
        assert await client.records_experts()
        first = await client.generate(PROMPT, SAMPLED, rid="first")
        longer = [*PROMPT, *first.token_ids.tolist(), 9]
        params = SamplingParams(12, ignore_eos=True, experts_from=len(first.experts))
        second = await client.generate(longer, params, rid="second")
        await publish.transport.close([client])
        return first, longer, second

    first, longer, second = talk(script, url)
    tokens = np.array([*longer, *second.token_ids], np.int32)
    experts = np.concatenate([first.experts, second.experts, np.full_like(first.experts[:1], -1)])
    mask = np.arange(len(tokens)) >= len(longer)
    behavior = np.zeros(len(tokens), np.float32)
    behavior[mask] = second.logprobs
    sample = Sample(0, tokens, mask, mask, behavior, np.ones(len(tokens), np.float32), experts=experts)
    [shard] = pack([sample], max_tokens=1000, world_size=1)
    [logprobs] = learner.one.own_logprobs(shard)
    np.testing.assert_allclose(logprobs, second.logprobs, atol=1e-4)
    metrics = learner.one.update(learner.one.score(shard))
    assert metrics["router/replayed"] == pytest.approx(1 - 1 / len(tokens))
    assert metrics["router/agreement"] > 0.99
