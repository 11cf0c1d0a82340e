"""Kernels with an implementation for GPUs alone: log-probabilities, and products of experts."""

import time

import pytest
import torch

from agentrl.algorithms.logprob_kernels import EAGER, HeadForm, choose_kernels, compiled
from agentrl.algorithms.logprobs import linear_logprobs_and_entropy
from agentrl.learner.experts import can_group, multiply_each, multiply_grouped
from parts.experts import write_experts
from parts.gpu import DEVICE, IS_GPU, distance, is_near, open_learner, samples_of, sized, step

TOKENS, WIDTH, VOCABULARY = sized((3000, 896, 151_936), (11, 8, 50))
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


def head(dtype, device):
    torch.manual_seed(1)
    hidden, weight = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH) * WIDTH**-0.5
    targets = torch.randint(VOCABULARY, (TOKENS,))
    hidden, weight = (t.to(dtype).to(device).requires_grad_() for t in (hidden, weight))
    return hidden, weight, targets.to(device)


def values_and_gradients(kernels, dtype, device, *, exact=False, form=None):
    hidden, weight, targets = head(dtype, device)
    if exact:  # float64 of the same rounded numbers
        hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logprobs, entropies = linear_logprobs_and_entropy(
        hidden, weight, targets, temperature=0.7, kernels=kernels, form=form or HeadForm(), chunk_tokens=1024
    )
    torch.manual_seed(2)
    upstream = torch.randn(2, TOKENS, dtype=torch.float64).to(device, logprobs.dtype)
    gradients = torch.autograd.grad(
        (logprobs * upstream[0] + 0.1 * entropies * upstream[1]).sum(), (hidden, weight)
    )
    return [t.detach().double().cpu() for t in (logprobs, entropies, *gradients)]


@pytest.mark.parametrize("form", [HeadForm(), HeadForm(scale=0.5, softcap=3.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_log_probabilities_are_the_plain_ones(dtype, form, measured):
    fused = choose_kernels("compiled", device=DEVICE) if IS_GPU else compiled("eager")
    expected = values_and_gradients(EAGER, dtype, DEVICE, exact=True, form=form)
    plain = values_and_gradients(EAGER, dtype, DEVICE, form=form)
    found = values_and_gradients(fused, dtype, DEVICE, form=form)
    for name, got, eager, right in zip(
        ("logprobs", "entropies", "hidden", "weight"), found, plain, expected, strict=True
    ):
        measured |= {name: distance(got, right), f"{name} plain": distance(eager, right)}
        assert measured[name] <= 2 * measured[f"{name} plain"] + 4 * ROUNDING[dtype], name
    if IS_GPU:
        for label, kernels in (("plain", EAGER), ("compiled", fused)):
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            started = time.perf_counter()
            values_and_gradients(kernels, dtype, DEVICE, form=form)
            measured[f"{label} ms"] = (time.perf_counter() - started) * 1e3
            measured[f"{label} peak MB"] = (torch.cuda.max_memory_allocated() - held) / 1e6


COUNTS = {"even": [8, 8, 8, 8], "odd": [3, 17, 1, 11], "empty": [0, 29, 0, 3], "all in one": [32, 0, 0, 0]}


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_products_of_experts_are_the_loop(counts, measured):
    num_rows = [n * sized(37, 1) for n in COUNTS[counts]]
    width, inner = sized((512, 256), (16, 24))
    torch.manual_seed(0)
    shapes = [(sum(num_rows), width), (4, 2 * inner, width), (4, width, inner)]
    tensors = [(torch.randn(s) / s[-1] ** 0.5).to(DEVICE, torch.bfloat16).requires_grad_() for s in shapes]
    assert can_group(*tensors)

    def gate(both):
        first, second = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(first) * second

    def run(multiply, operands):
        out = multiply(operands[0], num_rows, *operands[1:], gate)
        upstream = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype)
        return [t.detach().double().cpu() for t in (out, *torch.autograd.grad(out, operands, upstream))]

    expected = run(multiply_each, [t.detach().double().requires_grad_() for t in tensors])
    loop, grouped = run(multiply_each, tensors), run(multiply_grouped, tensors)
    for name, got, plain, right in zip(
        ("output", "rows", "gate_up", "down"), grouped, loop, expected, strict=True
    ):
        measured |= {name: distance(got, right), f"{name} loop": distance(plain, right)}
        assert measured[name] <= 2 * measured[f"{name} loop"] + ROUNDING[torch.bfloat16], name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_a_mixture_of_experts_is_that_of_the_cpu(tmp_path, measured, dtype):
    """On a GPU transformers multiplies all experts of a layer together; on a CPU, the oracle, one by one."""
    write_experts(tmp_path / "experts")
    samples = samples_of([9, 14, 6, 30], vocabulary=61)

    def run(**changes):
        with open_learner(tmp_path / "experts", **changes) as learner:
            return step(learner, samples)

    oracle = run(device="cpu", attention="segment_sdpa", master=torch.float64)
    rounded = run(device="cpu", attention="segment_sdpa", dtype=dtype)
    found = run(dtype=dtype)
    error, of_cpu = (distance(own.logprobs, oracle.logprobs) for own in (found, rounded))
    measured |= {"logprobs": error, "logprobs cpu": of_cpu}
    # In bfloat16 a token whose experts are almost equally good may go to another one, in each rounding to
    # another: only float32 is compared closely.
    if dtype == "float32":
        assert is_near(error, of_cpu, dtype)
        assert is_near(
            distance(found.gradients, oracle.gradients), distance(rounded.gradients, oracle.gradients), dtype
        )
    else:
        assert error < 0.1
