"""A learner's step on the device, against the CPU: log-probabilities, losses, gradients and new weights.

The oracle is the same step on the CPU in float64, segment by segment. A device's error is judged by that of
the CPU in the same dtype.
"""

import pytest
import torch

from parts.gpu import (
    FLOORS,
    IS_GPU,
    distance,
    is_near,
    open_learner,
    random_lengths,
    samples_of,
    sized,
    step,
)

SAMPLES = samples_of(random_lengths(sized(4000, 160)))
MOST = {"float32": 1e-4, "bfloat16": 0.1}
"""Relative errors of log-probabilities and gradients that no device may exceed."""

VARIANTS = {
    "plain": {},
    "recomputed": {"gradient_checkpointing": True},
    "inputs offloaded": {"gradient_checkpointing": True, "activation_offload": True},
    "adapter": {"lora": 8},
    "adapter recomputed": {"lora": 8, "gradient_checkpointing": True},
    **({"compiled": {"compile": True}, "kernels": {"logprob_kernels": "compiled"}} if IS_GPU else {}),
}


@pytest.fixture(scope="module")
def on_cpu(model):
    """Return the step of a variant on the CPU in a dtype; computed once."""
    known = {}

    def find(variant, dtype):
        key = ("adapter" in variant, dtype)
        if key not in known:
            single = {"dtype": "float32" if dtype == "float64" else dtype}
            master = torch.float64 if dtype == "float64" else torch.float32
            lora = VARIANTS[variant].get("lora", 0)
            with open_learner(
                model, device="cpu", master=master, attention="segment_sdpa", lora=lora, **single
            ) as learner:
                known[key] = step(learner, SAMPLES)
        return known[key]

    return find


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_is_that_of_the_cpu(model, on_cpu, measured, variant, dtype):
    if "lora" in VARIANTS[variant]:
        pytest.importorskip("peft")
    oracle, rounded = on_cpu(variant, "float64"), on_cpu(variant, dtype)
    with open_learner(model, dtype=dtype, **VARIANTS[variant]) as learner:
        found = step(learner, SAMPLES)
    for name in ("logprobs", "gradients", "changes"):
        error = distance(getattr(found, name), getattr(oracle, name))
        of_cpu = distance(getattr(rounded, name), getattr(oracle, name))
        measured |= {name: error, f"{name} cpu": of_cpu}
        assert is_near(error, of_cpu, dtype), (name, error, of_cpu)
        assert name == "changes" or error < MOST[dtype], name
    assert found.metrics["is_skipped"] == 0
    for name in ("loss", "grad_norm", "entropy", "kl", "ratio_mean"):
        expected = oracle.metrics[name]
        assert abs(found.metrics[name] - expected) <= 10 * FLOORS[dtype] * (1 + abs(expected)), name


def states_of(learner):
    states = learner._stepper.optimizer.state.values()
    return [value for state in states for value in state.values() if value.ndim > 0]


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_offloading_changes_where_numbers_are_and_not_which(model, measured, tmp_path, offload):
    with open_learner(model, offload="none") as learner:
        for _ in range(3):
            expected = step(learner, SAMPLES)
        held = torch.cuda.memory_allocated() if IS_GPU else 0
    with open_learner(model, offload=offload) as learner:
        for _ in range(2):
            step(learner, SAMPLES)
        states = states_of(learner)
        assert {value.device.type for value in states} == {"cpu"}
        if IS_GPU:
            freed, of_states = held - torch.cuda.memory_allocated(), sum(value.nbytes for value in states)
            measured |= {"freed MB": freed / 1e6, "state MB": of_states / 1e6}
            # Weights are half as much again.
            assert freed > 0.9 * of_states * (1.5 if offload == "parameters" else 1.0)
        learner.save(str(tmp_path / "saved"))
        learner.load(str(tmp_path / "saved"))
        assert {value.device.type for value in states_of(learner)} == {"cpu"}, "put away when loaded"
        found = step(learner, SAMPLES)
    # The optimizer of offloaded parameters runs on the CPU, where it rounds otherwise.
    assert distance(found.changes, expected.changes) < (1e-3 if offload == "parameters" else 1e-6)
