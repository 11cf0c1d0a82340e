"""An adapter for each role on the embedded server."""

import dataclasses

import numpy as np
import pytest
import trio

from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.rollout import EmbeddedServerConfig, WeightsConfig
from agentrl.errors import RequestRefused
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.learner.batch import Sample
from agentrl.learner.learner import LearnerSpec
from agentrl.learner.packing import pack
from agentrl.servers.client import SGLangClient
from agentrl.servers.protocol import POLICY_ADAPTER
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from agentrl.weights.publish import Publisher
from parts.learner import lone_learner, random_samples, write_tiny_model
from sglang_cpu.server import sglang_on_cpu

VOCABULARY = 300
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ROLES = {"worker": ("worker",), "critic": ("judge",)}
LORA = LoRAConfig(rank=8, alpha=16.0, target_modules=ATTENTION, roles=ROLES)
SPEAKER_OF = {None: "main", "worker": "worker", "critic": "judge"}
ATOL = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("roles")
    write_tiny_model(folder / "base", VOCABULARY, max_position_embeddings=512, eos_token_id=1, pad_token_id=0)
    return folder


@pytest.fixture(scope="module")
def learner(folder):
    model = ModelConfig(path=str(folder / "base"), lora=LORA)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2))
    spec = LearnerSpec(model, config, AlgorithmConfig(), "decoupled", 3, 1.0, 20)
    with lone_learner(spec) as one:
        train(one)
        yield one


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def url(folder, request):
    launcher = (
        EmbeddedServer(EmbeddedServerConfig(), "float32")
        if request.param == "embedded"
        else sglang_on_cpu(
            lora=LORA, lora_backend="torch_native", skip_tokenizer_init=True, max_total_tokens=4096
        )
    )
    supervisor = Supervisor(launcher, log_file=folder / "log", start_timeout_s=400, max_restarts=0)
    yield supervisor.start(str(folder / "base"), "default")
    supervisor.stop()


def train(one):
    names = ("main", "worker", "judge")
    samples = [
        dataclasses.replace(sample, segment_names=(names[index % 3],))
        for index, sample in enumerate(random_samples(9, VOCABULARY))
    ]
    [shard] = pack(samples, max_tokens=1000, world_size=1)
    one.update(one.score(shard))


def learners_logprobs(one, speaker, prompt, output):
    ids = np.array([*prompt, *output], np.int32)
    is_action, nothing = np.arange(len(ids)) >= len(prompt), np.zeros(len(ids), np.float32)
    sample = Sample(0, ids, is_action, is_action, nothing, nothing, segment_names=(speaker,))
    [shard] = pack([sample], max_tokens=len(ids), world_size=1)
    return one.own_logprobs(shard)[0]


def test_requests_of_all_roles_share_forwards_over_two_publishes(learner, url, tmp_path):
    config = WeightsConfig(adapter="alone")
    publisher = Publisher(LocalWorker(learner), config, folder=tmp_path, pause_mode="abort")
    prompts = [[5, 17, 42, *range(n)] for n in range(1, 10)]
    found = {}

    async def play(client, version):
        async def one(index, adapter):
            params = SamplingParams(20 + index, adapter=adapter)
            found[version, index] = (
                adapter,
                await client.generate(prompts[index], params, rid=f"{version}.{index}"),
            )

        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(one, index, (None, "worker", "critic")[index % 3])

    async def main():
        client = SGLangClient(url, adapter=POLICY_ADAPTER)
        for version in (1, 2):
            report = await publisher.publish(version, [client], must_verify=True)
            assert report.failed == {}
            await play(client, version)
            for (played, index), (adapter, generation) in found.items():
                if played == version:
                    own = learners_logprobs(
                        learner, SPEAKER_OF[adapter], prompts[index], generation.token_ids.tolist()
                    )
                    np.testing.assert_allclose(generation.logprobs, own, atol=ATOL)
                    assert set(generation.versions) == {version}
            train(learner)
        with pytest.raises(RequestRefused, match="stranger"):
            await client.generate([1], SamplingParams(2, adapter="stranger"), rid="unknown")
        await client.aclose()

    trio.run(main)
    others = learners_logprobs(learner, "worker", [1, 2], [3, 4]) - learners_logprobs(
        learner, "judge", [1, 2], [3, 4]
    )
    assert np.abs(others).max() > 1e-3, "the adapters differ"
