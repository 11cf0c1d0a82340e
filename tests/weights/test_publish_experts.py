"""A mixture of experts published to a running embedded server: it serves what the learner exports, experts
included, and a check finds an expert that was not updated.
"""

from functools import partial

import pytest
import trio
from safetensors.torch import load_file, save_file

from agentrl.cluster.workers import LocalWorker
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import WeightsConfig
from agentrl.errors import ConfigError
from agentrl.weights.publish import Publisher
from agentrl.weights.verify import check_known
from parts.experts import CONFIGS, write_experts
from parts.learner import learner_spec, lone_learner

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


def publisher(learner, folder, **options):
    config = WeightsConfig(verify=True, **options).model_copy(update={"bucket_bytes": BUCKET_BYTES})
    return Publisher(
        LocalWorker(learner), config, folder=folder / "out", pause_mode="abort", model=folder / "base"
    )


def test_names_and_shapes_are_those_of_the_source(learner, folder, tmp_path):
    specs = learner.tensor_specs()
    check_known(specs, folder / "base")
    weights = read(folder / "base")
    name = next(n for n in weights if ".experts.3." in n and is_down(n))
    file = tmp_path / "model.safetensors"
    save_file({key: t for key, t in weights.items() if key != name}, file)
    with pytest.raises(ConfigError, match=rf"would publish {name} \[.*nearest: .*experts"):
        check_known(specs, tmp_path)
    save_file(weights | {name: weights[name][1:].clone()}, file)
    with pytest.raises(ConfigError, match=rf"would publish {name} \[.*which has the shape \["):
        check_known(specs, tmp_path)


def test_buckets_are_bounded_although_a_layer_has_one_weight_for_all_experts(learner, folder):
    one = publisher(learner, folder, transport="distributed")
    trio.run(partial(one.transport.prepare, 1))
    largest = max(spec.num_bytes for spec in learner.tensor_specs() if ".experts." in spec.name)
    assert largest < BUCKET_BYTES
    of_experts = [b for b in one.transport._buckets if any(".experts." in spec.name for spec in b)]
    assert len(of_experts) > 2
    assert all(sum(spec.num_bytes for spec in bucket) <= BUCKET_BYTES for bucket in of_experts)


def is_down(name):
    return name.endswith(("experts.3.down_proj.weight", "experts.3.w2.weight"))


def read(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found
