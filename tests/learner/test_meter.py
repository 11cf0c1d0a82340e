"""Speeds of a rank's phases: operations by the model's sizes, and the share of a device's peak."""

import numpy as np
import pytest
import torch

from agentrl.config.algorithm import AlgorithmConfig, KLConfig
from agentrl.config.model_flops import ModelFlops
from agentrl.config.model_size import ModelSize
from agentrl.learner.batch import Sample
from agentrl.learner.device_peaks import find_peak, peak_of
from agentrl.learner.meter import Meter
from agentrl.learner.packing import filler, pack
from agentrl.learner.work import WorkCounter
from parts.learner import learner_spec, lone_learner, random_samples, tiny_sizes

SIZES = tiny_sizes(61)


@pytest.fixture(scope="module")
def learner():
    algorithm = AlgorithmConfig(kl=KLConfig(coefficient=0.1))
    with lone_learner(learner_spec(sizes=SIZES, algorithm=algorithm)) as started:
        yield started


def expected(samples, *, passes, only_loss):
    """Return the operations of a batch, from the lengths and masks of its samples."""
    flops = ModelFlops(ModelSize.of({**SIZES, "model_type": "qwen2"}))
    total = 0
    for sample in samples:
        num_scored = int((sample.loss_mask if only_loss else sample.action_mask).sum())
        total += passes * flops.forward([sample.num_tokens], num_scored=num_scored)
    return total


def test_usage_tells_the_operations_of_each_phase(learner):
    samples = random_samples(9, 61)
    [shard] = pack(samples, max_tokens=30, world_size=1)
    scored = learner.score([*shard, filler()])
    learner.update(scored)
    usage = learner.usage()
    by_policy_and_reference = expected(samples, passes=2, only_loss=False)
    assert usage["score_flops_per_s"] * usage["score_s"] == pytest.approx(by_policy_and_reference)
    of_update = expected(samples, passes=3, only_loss=True)
    assert usage["update_flops_per_s"] * usage["update_s"] == pytest.approx(of_update)
    assert usage["update_flops_per_s_per_rank"] == usage["update_flops_per_s"]
    assert not [name for name in usage if name.endswith(("_mfu", "_per_gpu_s"))], "a CPU has no known peak"


def test_a_shared_prompt_is_computed_once_and_attended_to_by_each_response(learner):
    rng, prompt = np.random.default_rng(0), np.arange(7)
    samples = []
    for index, length in enumerate((3, 5)):
        tokens = np.concatenate([prompt, rng.integers(0, 61, length)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        zeros = np.zeros(len(tokens), np.float32)
        samples.append(Sample(index, tokens, mask, mask, zeros, zeros))
    counter, size = learner._work, ModelSize.of({**SIZES, "model_type": "qwen2"})
    work = []
    for is_shared in (False, True):
        [shard] = pack(samples, max_tokens=99, world_size=1, shared_prefix=is_shared)
        work.append(counter.forward(shard))
    apart, together = work
    saved = ModelFlops(size).forward([len(prompt)], num_scored=0)
    # Responses attend to the prompt either way. Only the prompt itself is computed once less.
    assert together == apart - saved


@pytest.mark.parametrize("peak", [None, 1e9])
def test_utilisation_is_the_share_of_the_peak(learner, peak):
    meter = Meter(learner.place, peak_flops_per_s=peak)
    with meter.phase("update", num_tokens=10, num_flops=3e6):
        pass
    with meter.phase("unknown", num_tokens=10):
        pass
    usage = meter.finish()
    assert usage.get("update_mfu") == (None if peak is None else usage["update_flops_per_s"] / peak)
    assert not [name for name in usage if name.startswith("unknown_flops")]


def test_a_model_of_an_unknown_architecture_has_no_operations(learner):
    [shard] = pack(random_samples(2, 61), max_tokens=99, world_size=1)
    assert WorkCounter(None).forward(shard) == WorkCounter(None).update(shard) == 0.0


# ------------------------------------------------------------------------------------------------------ peaks


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 836),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_that_of_the_data_sheet(name, tflops):
    assert find_peak(name, torch.bfloat16) == (None if tflops is None else tflops * 1e12)


def test_float32_has_its_own_peak_unless_tf32_may_be_used():
    assert find_peak("NVIDIA H100 80GB HBM3", torch.float32) == 67e12
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert find_peak("NVIDIA H100 80GB HBM3", torch.float32) is None
    finally:
        torch.set_float32_matmul_precision(before)
    assert find_peak("NVIDIA H100 80GB HBM3", torch.float64) is None
    assert peak_of(torch.device("cpu"), torch.float32) is None
