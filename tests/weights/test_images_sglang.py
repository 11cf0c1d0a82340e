"""A real SGLang with a model that sees: it follows the learner by each transport, and its log-probabilities
with images are the learner's.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from agentrl.chat.codec import find_image_tokens, load_tokenizer
from agentrl.cluster.workers import LocalWorker
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import WeightsConfig
from agentrl.learner.batch import Sample
from agentrl.learner.packing import pack
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from agentrl.weights.publish import Publisher
from parts.clients import talk
from parts.learner import learner_spec, lone_learner
from parts.vision import sample_with_images, stored, write_seeing_model
from sglang_cpu.server import sglang_on_cpu

pytestmark = pytest.mark.sglang
SIZES = [(84, 56), (60, 61)]
TRANSPORTS = {
    "disk": {"transport": "disk"},
    "delta": {"transport": "disk", "delta": True},
    "distributed": {"transport": "distributed"},
    "tensor": {"transport": "tensor"},
}


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    folder = write_seeing_model(tmp_path_factory.mktemp("learner") / "model")
    with lone_learner(learner_spec(ModelConfig(path=str(folder)), temperature=1.0)) as one:
        yield SimpleNamespace(one=one, path=folder, workers=LocalWorker(one))


@pytest.fixture(scope="module")
def url(learner, tmp_path_factory):
    supervisor = Supervisor(
        sglang_on_cpu(max_total_tokens=2048, loads_changes=True),
        log_file=tmp_path_factory.mktemp("log") / "log",
        start_timeout_s=400,
        max_restarts=0,
    )
    yield supervisor.start(str(learner.path), "0")
    supervisor.stop()


def prompt_of(tokens, images):
    """Return a prompt that shows images as templates do, and where they are."""
    rendered = [11, 12]
    for _ in images:
        rendered += [tokens.placeholder - 1, tokens.placeholder, tokens.placeholder + 2, 13]
    return tokens.expand(rendered, images)


def own_logprobs(learner, ids, placed, generation):
    """Return the learner's log-probabilities of what a server sampled."""
    sampled = generation.token_ids
    tokens = np.array([*ids, *sampled], np.int32)
    mask = np.arange(len(tokens)) >= len(ids)
    behavior = np.zeros(len(tokens), np.float32)
    behavior[mask] = generation.logprobs
    ones = np.ones(len(tokens), np.float32)
    sample = Sample(0, tokens, mask, mask, behavior, ones, images=tuple(placed))
    [shard] = pack([sample], max_tokens=1000, world_size=1)
    [logprobs] = learner.own_logprobs(shard)
    return logprobs


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_brings_a_model_that_sees(learner, url, tmp_path, name):
    tokens = find_image_tokens(learner.path, load_tokenizer(learner.path))
    refs = stored(tmp_path / "images", *SIZES)
    ids, placed = prompt_of(tokens, refs)
    sampling = SamplingParams(16, ignore_eos=True, images=tuple(placed))
    rows = [sample_with_images(0, refs[:1], tokens, seed=seed) for seed in range(2)]

    async def script(client):
        config = WeightsConfig(verify=True, bucket_bytes=16384, **TRANSPORTS[name])
        publisher = Publisher(
            learner.workers, config, folder=tmp_path, pause_mode="retract", model=learner.path
        )
        found = []
        for version, row in enumerate(rows, 1):
            [shard] = pack([row], max_tokens=1000, world_size=1)
            learner.one.update(learner.one.score(shard))
            before = await client.generate(ids, sampling, rid=f"before{version}")
            report = await publisher.publish(version, [client])
            assert dict(report.failed) == dict(report.repaired) == {}
            after = await client.generate(ids, sampling, rid=f"after{version}")
            found += [(version, one, own_logprobs(learner.one, ids, placed, one)) for one in (before, after)]
        await publisher.transport.close([client])
        return found

    found = talk(script, url)
    assert [one.versions[0] == version for version, one, _ in found] == [False, True] * 2
    for version, generation, own in found:
        if generation.versions[0] == version:
            np.testing.assert_allclose(own, generation.logprobs, atol=1e-4)
        else:
            assert np.abs(own - generation.logprobs).max() > 1e-3
