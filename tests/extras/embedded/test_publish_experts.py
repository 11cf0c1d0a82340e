"""Experts on the embedded server, published by every transport."""

import dataclasses

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.cluster.workers import LocalWorker
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import EmbeddedServerConfig, WeightsConfig
from agentrl.errors import RequestRefused, ServerError
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.learner.batch import Sample
from agentrl.learner.packing import pack
from agentrl.servers.client import SGLangClient
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from agentrl.weights.publish import Publisher
from agentrl.weights.verify import Verifier
from parts.experts import CONFIGS, VOCABULARY, write_experts
from parts.learner import learner_spec, lone_learner, update_once

PROMPT = [5, 17, 42]
GREEDY = SamplingParams(24, temperature=1.0, top_k=1)
OPTIONS = [{"transport": "disk"}, {"transport": "disk", "delta": True}, {"transport": "distributed"}]
BUCKET_BYTES = 7000
"""Of one or two matrices of an expert."""


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write_experts(folder / "base", request.param, is_tied=request.param != "qwen3_moe")
    return folder


@pytest.fixture(scope="module")
def learner(folder):
    with lone_learner(learner_spec(ModelConfig(path=str(folder / "base")))) as one:
        yield one


@pytest.fixture(scope="module")
def url(folder):
    supervisor = Supervisor(
        EmbeddedServer(EmbeddedServerConfig(), "float32"),
        log_file=folder / "log",
        start_timeout_s=120,
        max_restarts=0,
    )
    yield supervisor.start(str(folder / "base"), "0")
    supervisor.stop()


def talk(script, url):
    async def main():
        with trio.fail_after(120):
            return await script(SGLangClient(url))

    return trio.run(main)


def publisher(learner, folder, **options):
    config = WeightsConfig(verify=True, **options).model_copy(update={"bucket_bytes": BUCKET_BYTES})
    return Publisher(
        LocalWorker(learner), config, folder=folder / "out", pause_mode="abort", model=folder / "base"
    )


def served(client):
    return client.generate(PROMPT, GREEDY, rid="served")


def forward(folder, generation):
    """Return the log-probabilities of a plain forward of an exported folder, by the loop over experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    ids = torch.tensor([*PROMPT, *generation.token_ids.tolist()])
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, ids[1:, None])[len(PROMPT) - 1 :, 0].numpy()


def change_an_expert(learner, layer=1):
    """Add to the matrices of all experts of a layer but the first, and to nothing else."""
    with torch.no_grad():
        for name, tensor in learner._policy.tensors.items():
            if f".{layer}." in name and "experts." in name and "shared" not in name:
                tensor[1:] += 0.05 * torch.randn_like(tensor[1:])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_served_log_probabilities_follow_every_update(learner, folder, url, options):
    async def script(client):
        one, seen = publisher(learner, folder, **options), []
        for version, change in enumerate((update_once, change_an_expert), start=1):
            change(learner, *([VOCABULARY] if change is update_once else []))
            report = await one.publish(version, [client])
            assert dict(report.failed) == {}
            learner.export(str(folder / "exported"))
            seen.append(await served(client))
            np.testing.assert_allclose(seen[-1].logprobs, forward(folder / "exported", seen[-1]), atol=1e-4)
            assert set(seen[-1].versions) == {version}
        await one.transport.close([client])
        return seen

    torch.manual_seed(0)
    before, after = talk(script, url)
    # Only experts differ: a server that kept them would sample the same again.
    assert np.abs(forward(folder / "exported", before) - before.logprobs).max() > 1e-2
    assert len(after.token_ids)


def test_the_learner_replays_the_experts_of_the_server(learner, folder, url):
    """Both compute in the same dtype here, so every choice agrees."""

    async def script(client):
        one = publisher(learner, folder, transport="disk")
        assert dict((await one.publish(30, [client])).failed) == {}
        params = dataclasses.replace(GREEDY, experts_from=0)
        first = await client.generate(PROMPT, params, rid="first")
        longer = [*PROMPT, *first.token_ids.tolist(), 9]
        params = dataclasses.replace(params, experts_from=len(first.experts))
        second = await client.generate(longer, params, rid="second")
        await one.transport.close([client])
        return first, longer, second

    first, longer, second = talk(script, url)
    assert second.num_cached_tokens == 0 or second.num_cached_tokens % 32 == 0
    tokens = np.array([*longer, *second.token_ids], np.int32)
    experts = np.concatenate([first.experts, second.experts, np.full_like(first.experts[:1], -1)])
    mask = np.arange(len(tokens)) >= len(longer)
    behavior = np.zeros(len(tokens), np.float32)
    behavior[mask] = second.logprobs
    sample = Sample(0, tokens, mask, mask, behavior, np.ones(len(tokens), np.float32), experts=experts)
    shard = pack([sample], max_tokens=1000, world_size=1)[0]
    [logprobs] = learner.own_logprobs(shard)
    metrics = learner.update(learner.score(shard))
    assert metrics["router/agreement"] == 1.0
    assert metrics["router/replayed"] == pytest.approx(1 - 1 / len(tokens))
    assert metrics["mismatch_max"] < 1.0
    assert len(logprobs) == len(second.token_ids)


def test_a_check_finds_one_expert_that_was_not_updated(learner, folder, url):
    """The server loads a folder in which one matrix of one expert is still that of the base model."""
    learner.export(str(folder / "stale"))
    [name] = [n for n in find_names(folder / "base") if ".1." in n and ".experts.3." in n and is_down(n)]
    new, old = read(folder / "stale"), read(folder / "base")
    assert not torch.equal(new[name], old[name])
    stale = new | {name: old[name]}
    save_file(stale, folder / "stale" / "model.safetensors", metadata={"format": "pt"})

    async def script(client):
        await client.pause("abort")
        await client.update_weights_from_disk(str(folder / "stale"), version=50, flush_cache=True)
        verifier = Verifier(publisher(learner, folder)._learner, False, 1.0)
        with pytest.raises(ServerError, match=rf"1 tensors differ and 0 are missing, first: {name}$"):
            await verifier.sums_agree(client)
        save_file(new, folder / "stale" / "model.safetensors", metadata={"format": "pt"})
        await client.update_weights_from_disk(str(folder / "stale"), version=51, flush_cache=True)
        assert await verifier.sums_agree(client)
        await client.resume()

    talk(script, url)


def test_a_server_refuses_an_incomplete_or_fused_set_of_experts(learner, folder, url, tmp_path):
    """And samples as before."""
    learner.export(str(tmp_path / "whole"))
    weights = read(tmp_path / "whole")
    name = next(n for n in weights if ".experts.3." in n and is_down(n))
    fused = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()

    async def refused(client, tensors, message):
        file = tmp_path / "whole" / "model.safetensors"
        save_file({key: t.clone() for key, t in tensors.items()}, file, metadata={"format": "pt"})
        with pytest.raises(RequestRefused, match=message):
            await client.update_weights_from_disk(str(file.parent), version=60, flush_cache=True)

    async def script(client):
        before = await served(client)
        missing = {key: t for key, t in weights.items() if key != name}
        await refused(client, missing, f"1 weights are missing, the first is '{name}'")
        wrong = weights | {name: weights[name][1:]}
        await refused(client, wrong, f"'{name}' has shape")
        await refused(
            client, fused, r"\d names are no weights of this model, the first is .*experts\.down_proj"
        )
        after = await served(client)
        assert after.logprobs.tolist() == before.logprobs.tolist()

    talk(script, url)


def is_down(name):
    return name.endswith(("experts.3.down_proj.weight", "experts.3.w2.weight"))


def find_names(folder):
    return sorted(read(folder))


def read(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found
