"""A LoRA adapter published alone to a real SGLang: tokens carry the log-probabilities of the merged policy of
their version.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trio
from transformers import AutoModelForCausalLM

from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.rollout import WeightsConfig
from agentrl.learner.learner import LearnerSpec
from agentrl.servers.client import SGLangClient
from agentrl.servers.protocol import POLICY_ADAPTER
from agentrl.servers.router import Router
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from agentrl.weights.publish import Publisher
from parts.learner import lone_learner, update_once, write_tiny_model
from sglang_cpu.server import sglang_on_cpu

pytestmark = pytest.mark.sglang
VOCABULARY = 300
LORA = LoRAConfig(rank=8, alpha=16.0, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
PROMPT = [5, 17, 42]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    write_tiny_model(folder / "base", VOCABULARY, max_position_embeddings=512, eos_token_id=1, pad_token_id=0)
    return folder


@pytest.fixture(scope="module")
def learner(folder):
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2))
    spec = LearnerSpec(
        ModelConfig(path=str(folder / "base"), lora=LORA), config, AlgorithmConfig(), "decoupled", 3, 1.0, 20
    )
    with lone_learner(spec) as one:
        yield one


@pytest.fixture(scope="module")
def url(folder):
    launcher = sglang_on_cpu(
        lora=LORA, lora_backend="torch_native", skip_tokenizer_init=True, max_total_tokens=4096
    )
    supervisor = Supervisor(launcher, log_file=folder / "log", start_timeout_s=400, max_restarts=0)
    yield supervisor.start(str(folder / "base"), "default")
    supervisor.stop()


def exported(one, folder):
    one.export(str(folder))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs_of(model, prompt, output):
    logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0].numpy()


def play(script):
    async def main():
        with trio.fail_after(400):
            return await script()

    return trio.run(main)


def test_generations_across_publishes_have_the_merged_policys_logprobs(folder, learner, url, tmp_path):
    """Two publishes while generations go on; beside them the base model is served unchanged."""
    publish = Publisher(
        LocalWorker(learner), WeightsConfig(adapter="alone"), folder=tmp_path, pause_mode="abort"
    ).publish
    policies, pieces, reports = {}, [], []

    class Recording(SGLangClient):
        async def generate(self, input_ids, params, *, rid):
            piece = await super().generate(input_ids, params, rid=rid)
            pieces.append((list(input_ids), piece))
            return piece

    async def publish_next(client):
        update_once(learner, VOCABULARY)
        version = len(policies) + 1
        policies[version] = exported(learner, folder / f"v{version}")
        reports.append(await publish(version, [client]))

    async def script():
        client, plain = SGLangClient(url, adapter=POLICY_ADAPTER), SGLangClient(url)
        await publish_next(client)
        router = Router(partial(Recording, adapter=POLICY_ADAPTER))
        router.set_servers([url], version=1)

        async def generate(index):
            await router.generate([*PROMPT, index], SamplingParams(300), trajectory_key=str(index))

        async with trio.open_nursery() as watching:
            watching.start_soon(router.watch)
            async with trio.open_nursery() as playing:
                for index in range(6):
                    playing.start_soon(generate, index)
                for _ in range(2):
                    before = len(pieces)
                    while (await client.loads()).num_used_tokens < 60 and len(pieces) == before:
                        await trio.sleep(0.01)
                    await publish_next(client)
            watching.cancel_scope.cancel()
        base = await plain.generate(PROMPT, SamplingParams(12, temperature=0.0), rid="base")
        for each in (router, client, plain):
            await each.aclose()
        return SimpleNamespace(base=base)

    base = play(script).base
    assert [(dict(report.failed), dict(report.repaired)) for report in reports] == [({}, {})] * 3
    assert {int(version) for _, piece in pieces for version in piece.versions} == {1, 2, 3}
    for prompt, piece in pieces:
        assert len(set(piece.versions.tolist())) <= 1
        if len(piece.versions):
            expected = logprobs_of(policies[int(piece.versions[0])], prompt, piece.token_ids.tolist())
            np.testing.assert_allclose(piece.logprobs, expected, atol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    np.testing.assert_allclose(base.logprobs, logprobs_of(model, PROMPT, base.token_ids.tolist()), atol=1e-4)
