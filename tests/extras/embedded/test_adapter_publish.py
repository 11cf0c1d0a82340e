"""Adapters on the embedded server, published alone."""

import json
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.rollout import MAX_ADAPTERS, EmbeddedServerConfig, WeightsConfig
from agentrl.config.schema import Config
from agentrl.controller.attached import confirm_adapter
from agentrl.errors import ConfigError, RequestRefused
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.learner.learner import LearnerSpec
from agentrl.servers.client import SGLangClient
from agentrl.servers.protocol import POLICY_ADAPTER
from agentrl.servers.router import Router
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from agentrl.weights.publish import Publisher
from parts.learner import lone_learner, update_once, write_tiny_model

VOCABULARY = 61
LORA = LoRAConfig(rank=3, alpha=6.0)
PROMPT = [5, 17, 42]
GREEDY = SamplingParams(12, temperature=0.0)
ATOL = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    write_tiny_model(folder / "base", VOCABULARY, max_position_embeddings=512, eos_token_id=VOCABULARY - 1)
    return folder


@pytest.fixture(scope="module")
def learner(folder):
    """A learner whose adapter has learned something; `train` makes one more update."""
    optimizer = OptimizerConfig(lr=1e-2)
    model = ModelConfig(path=str(folder / "base"), lora=LORA)
    spec = LearnerSpec(model, LearnerConfig(optimizer=optimizer), AlgorithmConfig(), "decoupled", 3, 1.0, 20)
    with lone_learner(spec) as one:
        update_once(one, VOCABULARY)
        yield one


def start(folder, log, **options):
    supervisor = Supervisor(
        EmbeddedServer(EmbeddedServerConfig(**options), "float32"),
        log_file=log,
        start_timeout_s=120,
        max_restarts=3,
    )
    return supervisor, supervisor.start(str(folder / "base"), "default")


@pytest.fixture(scope="module")
def server(folder):
    """Two servers, of which the second takes smaller adapters alone."""
    (supervisor, url), (other, narrow) = (
        start(folder, folder / "log"),
        start(folder, folder / "narrow", max_lora_rank=2),
    )
    yield SimpleNamespace(supervisor=supervisor, url=url, narrow=narrow)
    supervisor.stop()
    other.stop()


def publisher(learner, folder, adapter="alone", **options):
    config = WeightsConfig(adapter=adapter, **options)
    return Publisher(LocalWorker(learner), config, folder=folder, pause_mode="abort")


def talk(script, *urls, adapter=POLICY_ADAPTER):
    """Run an async function with a client per URL; at the end nothing is paused and no adapter is loaded."""

    async def main():
        clients = [SGLangClient(url, adapter=adapter) for url in urls]
        try:
            with trio.fail_after(60):
                return await script(*clients)
        finally:
            for client in clients:
                await client.resume()
                with suppress(RequestRefused):  # it has none
                    await client.unload_adapter(POLICY_ADAPTER)
                await client.aclose()

    return trio.run(main)


@torch.no_grad()
def logprobs_of(model, prompt, output):
    logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0].numpy()


def exported(learner, folder):
    """The learner's policy with its adapter merged, read by transformers."""
    learner.export(str(folder))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def base_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()


# ------------------------------------------------------------------------------------------- what is computed


def test_alone_computes_what_merged_computes(learner, folder, server, tmp_path):
    async def script(client):
        reports = [await publisher(learner, tmp_path / "alone", verify=True).publish(1, [client])]
        alone = await client.generate(PROMPT, GREEDY, rid="alone")
        plain = SGLangClient(server.url)
        base = await plain.generate(PROMPT, GREEDY, rid="base")
        reports.append(
            await publisher(learner, tmp_path / "merged", "merged", verify=True).publish(2, [plain])
        )
        merged = await plain.generate(PROMPT, GREEDY, rid="merged")
        await plain.update_weights_from_disk(str(folder / "base"), version=0, flush_cache=True)
        await plain.aclose()
        return reports, alone, base, merged

    reports, alone, base, merged = talk(script, server.url)
    assert [report.failed for report in reports] == [{}, {}]
    assert reports[0].num_bytes == sum(
        t.nbytes for t in load_file(tmp_path / "alone/v000001/adapter_model.safetensors").values()
    )
    assert reports[0].num_bytes < reports[1].num_bytes / 4
    ids = alone.token_ids.tolist()
    assert ids == merged.token_ids.tolist()
    np.testing.assert_allclose(alone.logprobs, merged.logprobs, atol=ATOL)
    np.testing.assert_allclose(
        alone.logprobs, logprobs_of(exported(learner, tmp_path / "policy"), PROMPT, ids), atol=ATOL
    )
    np.testing.assert_allclose(
        base.logprobs, logprobs_of(base_of(folder), PROMPT, base.token_ids.tolist()), atol=ATOL
    )
    assert np.abs(logprobs_of(base_of(folder), PROMPT, ids) - alone.logprobs).max() > 0.01
    assert (set(alone.versions), set(merged.versions)) == ({1}, {2})


def test_requests_with_and_without_the_adapter_share_forwards(learner, folder, server, tmp_path):
    prompts = [[*PROMPT, *range(n)] for n in range(1, 9)]
    found = {}

    async def script(client):
        await publisher(learner, tmp_path).publish(1, [client])
        plain = SGLangClient(server.url)

        async def one(index):
            found[index] = await (client if index % 3 else plain).generate(
                prompts[index], SamplingParams(30 + index), rid=str(index)
            )

        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(one, index)
        await plain.aclose()

    talk(script, server.url)
    policy, base = exported(learner, tmp_path / "policy"), base_of(folder)
    for index, generation in found.items():
        expected = logprobs_of(policy if index % 3 else base, prompts[index], generation.token_ids.tolist())
        np.testing.assert_allclose(generation.logprobs, expected, atol=ATOL)


def test_every_token_is_of_its_version_across_publishes(learner, server, tmp_path):
    """Generations go on over two publishes, some of their requests held back by a pause: each piece is what
    its version computes.
    """
    num, total, models, pieces = 6, 400, {}, []

    class Recording(SGLangClient):
        async def generate(self, input_ids, params, *, rid):
            piece = await super().generate(input_ids, params, rid=rid)
            pieces.append((list(input_ids), piece))
            return piece

    async def script(client):
        publish = publisher(learner, tmp_path / "weights").publish
        models[1] = exported(learner, tmp_path / "v1")
        await publish(1, [client])
        router = Router(partial(Recording, adapter=POLICY_ADAPTER))
        router.set_servers([server.url], version=1)

        is_last_published = trio.Event()

        async def play(index):
            """Generate again and again: the last time with what was published last, however quick the server
            is.
            """
            is_last = False
            while not is_last:
                is_last = is_last_published.is_set()
                await router.generate([*PROMPT, index], SamplingParams(total), trajectory_key=str(index))

        async with trio.open_nursery() as watching:
            watching.start_soon(router.watch)
            async with trio.open_nursery() as playing:
                for index in range(num):
                    playing.start_soon(play, index)
                for version in (2, 3):
                    while (await client.loads()).num_used_tokens < num * (len(PROMPT) + 1) + 60:
                        await trio.sleep(0.005)
                    update_once(learner, VOCABULARY)
                    models[version] = exported(learner, tmp_path / f"v{version}")
                    report = await publish(version, [client])
                    assert report.failed == {}
                is_last_published.set()
            watching.cancel_scope.cancel()
        await router.aclose()

    talk(script, server.url)
    assert {int(version) for _, piece in pieces for version in piece.versions} == {1, 2, 3}
    for prompt, piece in pieces:
        assert len(set(piece.versions.tolist())) <= 1
        if len(piece.versions):
            expected = logprobs_of(models[int(piece.versions[0])], prompt, piece.token_ids.tolist())
            np.testing.assert_allclose(piece.logprobs, expected, atol=ATOL)


def test_a_restarted_server_gets_the_adapter_on_its_base(learner, server, tmp_path):
    model = exported(learner, tmp_path / "policy")
    publish = publisher(learner, tmp_path / "weights", verify=True).publish

    async def once(client):
        report = await publish(4, [client])
        return report, await client.generate(PROMPT, GREEDY, rid="once")

    talk(once, server.url)
    server.supervisor.restart(server.supervisor.status().url)
    with_weights = trio.run(until_needs_weights, server.supervisor)
    report, generation = talk(once, with_weights.url)
    server.url = with_weights.url
    assert report.failed == {}
    np.testing.assert_allclose(
        generation.logprobs, logprobs_of(model, PROMPT, generation.token_ids.tolist()), atol=ATOL
    )
    assert set(generation.versions) == {4}


async def until_needs_weights(supervisor):
    with trio.fail_after(60):
        while (status := supervisor.status()).state != "needs_weights":
            await trio.sleep(0.05)
        return status


def test_a_server_that_does_not_take_the_adapter_is_named_and_stays_behind(learner, server, tmp_path):
    async def script(wide, narrow):
        await narrow.update_weight_version(0)
        report = await publisher(learner, tmp_path).publish(5, [wide, narrow])
        return (
            report,
            (await wide.model_info()).version,
            (await narrow.model_info()).version,
            await narrow.server_info(),
        )

    report, wide, narrow, info = talk(script, server.url, server.narrow)
    assert list(report.failed) == [server.narrow]
    assert "rank 3" in report.failed[server.narrow]
    assert (wide, narrow) == (5, 0)
    assert info["is_paused"]


# --------------------------------------------------------------------------------------------------- refusals


def no_file(tensors, config):
    """Its tensors are missing."""


def no_config(tensors, config):
    """Its config is missing."""


MISSING = {no_file: "adapter_model.safetensors", no_config: "adapter_config.json"}


def half_a_config(tensors, config):
    config.clear()


def wrong_shape(tensors, config):
    tensors[next(iter(tensors))] = torch.zeros(3, 7)


def unknown_module(tensors, config):
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = torch.zeros(3, 32)


def half_a_pair(tensors, config):
    del tensors[next(name for name in tensors if "lora_A" in name)]


def not_finite(tensors, config):
    name = next(iter(tensors))
    tensors[name] = torch.full_like(tensors[name], float("nan"))


def foreign_name(tensors, config):
    tensors["model.norm.weight"] = torch.zeros(32)


def high_rank(tensors, config):
    config["r"] = 300


def other_kind(tensors, config):
    config["use_dora"] = True


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_file, "cannot be read"),
        (no_config, "adapter_config.json cannot be read"),
        (half_a_config, "KeyError"),
        (wrong_shape, "shapes"),
        (unknown_module, "not a linear layer"),
        (half_a_pair, "lora_B alone"),
        (not_finite, "finite"),
        (foreign_name, "no tensor of a LoRA adapter"),
        (high_rank, "rank 300"),
        (other_kind, "use_dora"),
    ],
)
def test_a_bad_adapter_is_refused_and_changes_nothing(learner, server, tmp_path, spoil, message):
    learner.export_adapter(str(tmp_path / "good"))
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    tensors = load_file(tmp_path / "good/adapter_model.safetensors")
    config = json.loads((tmp_path / "good/adapter_config.json").read_text())
    spoil(tensors, config)
    save_file(tensors, spoilt / "adapter_model.safetensors")
    (spoilt / "adapter_config.json").write_text(json.dumps(config))
    if name := MISSING.get(spoil):
        (spoilt / name).unlink()

    async def script(client):
        held = await client.checksums()
        with pytest.raises(RequestRefused, match=message) as caught:
            await client.load_adapter(POLICY_ADAPTER, str(spoilt))
        assert caught.value.status == 400
        assert await client.checksums() == held
        with pytest.raises(RequestRefused, match="none is"):
            await client.generate(PROMPT, GREEDY, rid="unloaded")
        await client.load_adapter(POLICY_ADAPTER, str(tmp_path / "good"))
        assert set(await client.checksums()) > set(held)

    talk(script, server.url)


def test_names_of_adapters_are_checked(learner, server, tmp_path):
    learner.export_adapter(str(tmp_path / "good"))

    async def script(client):
        with pytest.raises(RequestRefused, match="no LoRA adapter 'policy' is loaded"):
            await client.unload_adapter(POLICY_ADAPTER)
        await client.load_adapter(POLICY_ADAPTER, str(tmp_path / "good"))
        with pytest.raises(RequestRefused, match="'policy' is loaded already; unload it first"):
            await client.load_adapter(POLICY_ADAPTER, str(tmp_path / "good"))
        others = [f"other{number}" for number in range(MAX_ADAPTERS - 1)]
        for name in others:
            await client.load_adapter(name, str(tmp_path / "good"))
        with pytest.raises(RequestRefused, match=f"at most {MAX_ADAPTERS} LoRA adapters"):
            await client.load_adapter("second", str(tmp_path / "good"))
        for name in others:
            await client.unload_adapter(name)
        stranger = SGLangClient(client.url, adapter="second")
        with pytest.raises(RequestRefused, match="'second'"):
            await stranger.generate(PROMPT, GREEDY, rid="stranger")
        await stranger.aclose()

    talk(script, server.url)


# ----------------------------------------------------------------------------------------------------- config


def config_of(*, lora, path="/m", baselines=None, **rollout):
    return Config.model_validate(
        {
            "model": {"path": str(path), "lora": lora},
            "rollout": rollout,
            "tracking": {"baselines": baselines or {}},
        }
    )


def test_attached_servers_are_asked(folder, server):
    async def ask(urls, script):
        clients = [SGLangClient(url) for url in urls]
        try:
            return await script(clients)
        finally:
            for client in clients:
                await client.aclose()

    def confirm(url, path, adapter):
        given = config_of(lora={"rank": 3}, path=path, urls=[url], weights={"adapter": adapter})
        fleet = SimpleNamespace(talk=partial(trio.run, ask), wait_until_attached=lambda: [url])
        return confirm_adapter(given.with_adapter_resolved, given, fleet).rollout.weights.adapter

    assert confirm(server.url, folder / "base", "auto") == "alone"
    assert confirm(server.narrow, folder / "base", "auto") == "merged"
    assert confirm(server.url, folder / "else", "auto") == "merged"
    with pytest.raises(
        ConfigError, match=r"loads adapters up to rank 2, but model\.lora\.rank is 3; use auto or merged"
    ):
        confirm(server.narrow, folder / "base", "alone")
    with pytest.raises(ConfigError, match="serves"):
        confirm(server.url, folder / "else", "alone")
