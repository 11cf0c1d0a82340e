"""The embedded server on the device, beside a learner on the same one: what it samples and gives back."""

import json

import numpy as np
import pytest
import torch
import trio

from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.learner.learner import Learner
from agentrl.servers.client import SGLangClient
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from parts.gpu import IS_GPU, VOCABULARY, OnDevice, logprobs_of, open_learner, samples_of, sized, step

CONFIG = EmbeddedServerConfig(
    num_blocks=sized(4096, 64), page_size=32, max_batch_tokens=sized(8192, 128), max_requests_per_batch=128
)
MOST = {"float32": 1e-3, "bfloat16": 0.05}
"""Mean difference of log-probabilities in nats: `weights.verify` allows 1e-3 and 0.15."""
LENGTHS = [3, 17, sized(900, 40), 64, 5]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(request, model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server.log"
    supervisor = Supervisor(
        OnDevice(CONFIG, request.param), log_file=log, start_timeout_s=240, max_restarts=0
    )
    try:
        yield supervisor.start(str(model), "0"), request.param
    finally:
        supervisor.stop()


def talk(url, script):
    async def main():
        client = SGLangClient(url)
        try:
            with trio.fail_after(200):
                return await script(client)
        finally:
            await client.aclose()

    return trio.run(main)


async def sample(client, *, temperature=0.8, num_tokens=24):
    """Return (prompt, tokens, log-probabilities, versions) of some requests at once."""
    found = {}

    async def one(index, length):
        prompt = np.random.default_rng(index).integers(0, VOCABULARY, length).tolist()
        params = SamplingParams(num_tokens, temperature=temperature)
        got = await client.generate(prompt, params, rid=f"{index}-{np.random.random()}")
        found[index] = (prompt, got.token_ids.tolist(), got.logprobs, got.versions)

    async with trio.open_nursery() as nursery:
        for index, length in enumerate(LENGTHS):
            nursery.start_soon(one, index, length)
    return [found[i] for i in sorted(found)]


def mean_difference(learner: Learner, sampled):
    differences = [np.abs(logprobs_of(learner, p, tokens) - own) for p, tokens, own, _ in sampled]
    return float(np.concatenate(differences).mean())


def test_sampled_log_probabilities_are_the_learners_and_follow_an_update(server, model, measured, tmp_path):
    url, dtype = server
    with open_learner(model, dtype=dtype, attention="segment_sdpa") as learner:
        before = talk(url, sample)
        measured["before"] = mean_difference(learner, before)
        assert measured["before"] < MOST[dtype]
        step(learner, samples_of([40, 25, 13]))
        measured["old weights"] = mean_difference(learner, before)
        assert measured["old weights"] > 2 * measured["before"], "the update must be visible"
        learner.export(str(tmp_path / "policy"))
        own = learner.checksums()

        async def publish(client):
            await client.pause("abort")
            await client.update_weights_from_disk(str(tmp_path / "policy"), version=1, flush_cache=True)
            await client.resume()
            return await sample(client), await client.checksums()

        after, sums = talk(url, publish)
        assert {int(v) for *_, versions in after for v in versions} == {1}
        assert {name: sums[name] for name in own} == own
        measured["after"] = mean_difference(learner, after)
        assert measured["after"] < MOST[dtype]

    async def restore(client):
        await client.update_weights_from_disk(str(model), version=0, flush_cache=True)

    talk(url, restore)


def test_released_memory_is_free_for_others_and_comes_back_with_the_weights(server, model, measured):
    url, dtype = server

    async def script(client):
        greedy = await sample(client, temperature=0.0)
        sums = await client.checksums()
        held = free_bytes()
        await client.pause("abort")
        await client.release_memory()
        freed = free_bytes() - held
        await client.resume_memory()
        await client.resume()
        return greedy, await sample(client, temperature=0.0), sums, await client.checksums(), freed

    before, after, old_sums, sums, freed = talk(url, script)
    assert sums == old_sums
    assert [tokens for _, tokens, *_ in after] == [tokens for _, tokens, *_ in before]
    if IS_GPU:
        config = json.loads((model / "config.json").read_text())
        of_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["hidden_size"]
        of_token //= config["num_attention_heads"]
        size = 4 if dtype == "float32" else 2
        cache = CONFIG.num_blocks * CONFIG.page_size * of_token * size
        weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) * size / 4
        measured |= {"freed MB": freed / 1e6, "weights MB": weights / 1e6, "cache MB": cache / 1e6}
        assert freed > 0.9 * (weights + cache)


def free_bytes():
    if not IS_GPU:
        return 0
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_a_learner_gives_back_what_it_keeps_for_later_steps(model, measured):
    with open_learner(model) as learner:
        step(learner, samples_of([sized(2000, 30), sized(1500, 20)]))
        if IS_GPU:
            kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            before = free_bytes()
        learner.give_back_memory()
        if IS_GPU:
            measured |= {"kept MB": kept / 1e6, "given back MB": (free_bytes() - before) / 1e6}
            assert free_bytes() - before > 0.5 * kept
        step(learner, samples_of([20]))  # as before


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_time_of_sampling(server, measured, temperature):
    """A figure, not a law: tokens per second of some requests at once."""
    url, _ = server

    async def timed(client):
        started = trio.current_time()
        found = await sample(client, temperature=temperature, num_tokens=sized(256, 8))
        return sum(len(tokens) for _, tokens, *_ in found) / (trio.current_time() - started)

    measured["tokens per s"] = talk(url, timed)
    assert measured["tokens per s"] > 0
