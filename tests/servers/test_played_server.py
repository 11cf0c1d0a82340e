"""The server that tests of the core start in SGLang's place: what it says of a policy is true."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.config.rollout import RolloutConfig
from agentrl.errors import RequestRefused, ServerError
from agentrl.servers.client import SGLangClient
from agentrl.servers.launch import SGLangServer
from agentrl.servers.router import Router
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from parts.played_server import played_sglang

PROMPT = [5, 9, 2, 77, 300, 41]
KEY = "a key"
NUM_SAMPLED, HELD_AT = 60, 20


def write_policy(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return write_policy(folder / "first", 0), write_policy(folder / "second", 1)


@contextmanager
def started(policy: Path, folder: Path, **arguments):
    """Start a server as a run starts SGLang, with a key."""
    launcher = SGLangServer(RolloutConfig(**played_sglang(**arguments)).sglang, "float32", KEY)
    supervisor = Supervisor(launcher, log_file=folder / "server.log", start_timeout_s=60, max_restarts=0)
    try:
        yield supervisor.start(str(policy), "0")
    finally:
        supervisor.stop()


@pytest.fixture(scope="module")
def running(policies, tmp_path_factory):
    with started(policies[0], tmp_path_factory.mktemp("log")) as url:
        yield url


def talk_to(url: str, script):
    async def main():
        client = SGLangClient(url, api_key=KEY)
        with trio.fail_after(60):
            try:
                return await script(client)
            finally:
                await client.aclose()

    return trio.run(main)


@pytest.fixture
def talk(running):
    """Run an async function with a client of the server, which has the first policy as version 0."""
    return partial(talk_to, running)


@torch.no_grad()
def logprobs(folder: Path, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Return the log-probability of each token after the first, by transformers."""
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scores = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1] / temperature, -1)
    return scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_policy(talk, policies, temperature):
    params = SamplingParams(40, temperature=temperature, ignore_eos=True)
    said = talk(lambda client: client.generate(PROMPT, params, rid="a"))
    expected = logprobs(policies[0], [*PROMPT, *said.token_ids.tolist()], temperature)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(said.logprobs, expected, atol=1e-5)
    assert (said.finish_reason, len(said.token_ids), set(said.versions.tolist())) == ("length", 40, {0})


def test_a_prompt_is_scored(talk, policies):
    scored = talk(lambda client: client.prompt_logprobs(PROMPT, first=2, rid="a"))
    np.testing.assert_allclose(scored, logprobs(policies[0], PROMPT)[1:], atol=1e-5)


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_each_token_has_the_version_of_the_weights_that_sampled_it(policies, mode, tmp_path):
    """Contract 2, with the router that continues what a pause has interrupted."""
    params = SamplingParams(NUM_SAMPLED, ignore_eos=True)

    async def script(client):
        router = Router(lambda url: client, vocab_size=384, context_tokens=512)
        router.set_servers([client.url], version=0)

        async def publish():
            while (await client.loads()).num_used_tokens < len(PROMPT) + HELD_AT - 1:
                await trio.sleep(0.001)
            await client.pause(mode)
            await client.update_weights_from_disk(str(policies[1]), version=1, flush_cache=True)
            router.set_servers([client.url], version=1)
            await client.resume()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.watch)
            nursery.start_soon(publish)
            said = await router.generate(PROMPT, params, trajectory_key="a")
            nursery.cancel_scope.cancel()
        return said

    with started(policies[0], tmp_path, hold_at_tokens=HELD_AT) as url:
        said = talk_to(url, script)
    ids, versions = [*PROMPT, *said.token_ids.tolist()], said.versions
    assert versions.tolist() == [0] * HELD_AT + [1] * (NUM_SAMPLED - HELD_AT)
    for version, folder in enumerate(policies):
        own = versions == version
        expected = logprobs(folder, ids)[len(PROMPT) - 1 :]
        np.testing.assert_allclose(said.logprobs[own], expected[own], atol=1e-5)


def test_what_is_wrong_is_refused_and_changes_nothing(talk, policies, tmp_path):
    async def script(client):
        with pytest.raises(RequestRefused, match="below 384"):
            await client.generate([384], SamplingParams(4), rid="a")
        with pytest.raises(RequestRefused, match="maximum context length"):
            await client.generate(PROMPT, SamplingParams(512), rid="a")
        with pytest.raises(ServerError, match="no weights"):
            await client.update_weights_from_disk(str(tmp_path), version=1, flush_cache=True)
        return (await client.model_info()).version, await client.generate(PROMPT, SamplingParams(4), rid="a")

    version, said = talk(script)
    assert version == 0
    assert set(said.versions.tolist()) == {0}


def test_a_stranger_is_refused(running):
    async def main():
        client = SGLangClient(running)
        try:
            with pytest.raises(ServerError, match="401"):
                await client.loads()
        finally:
            await client.aclose()

    trio.run(main)
