"""Attention over packed segments on the device, against one segment after the other in float64 on the CPU."""

import importlib.util
import time

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from agentrl.learner import attention
from agentrl.learner.attention import Segments, segment_sdpa
from parts.gpu import (
    DEVICE,
    FLOORS,
    IS_GPU,
    distance,
    open_learner,
    packed,
    random_lengths,
    samples_of,
    sized,
)

LENGTHS = random_lengths(sized(4000, 90))
CASES = {
    "segments": {},
    "one": {"lengths": [LENGTHS[0]]},
    "single tokens": {"lengths": [1, 1, 3, 1]},
    "window": {"window": 7},
    "prefixes": {"prefixes": [-1, *(0 for _ in LENGTHS[1:])]},
    "prefixes and window": {"prefixes": [-1, *(0 for _ in LENGTHS[1:])], "window": 5},
    "all heads": {"heads": (4, 4)},
    "wide heads": {"width": 128},
}
IN_KERNEL = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: FLOORS["float32"]}
"""Rounding of a number by dtype."""


def by_rows(query, key, value, lengths, prefixes, window):
    """Return f64[1, T, H, D] by explicit masks, independent of the code under test."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    outputs = []
    for i, length in enumerate(lengths):
        own = range(starts[i], starts[i] + length)
        prefix = -1 if prefixes is None else prefixes[i]
        before = range(starts[prefix], starts[prefix] + lengths[prefix]) if prefix >= 0 else range(0)
        places = torch.tensor([*before, *own])
        keys, values = key[:, :, places], value[:, :, places]
        ends = torch.arange(len(before), len(places))
        behind = ends[:, None] - torch.arange(len(places))[None]
        mask = (behind >= 0) & (behind < (window or len(places)))
        repeats = query.shape[1] // key.shape[1]
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, list(own)],
                keys.repeat_interleave(repeats, 1),
                values.repeat_interleave(repeats, 1),
                attn_mask=mask,
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_packed_attention_and_its_gradients_are_those_of_each_segment_alone(case, dtype, measured):
    given = {"lengths": LENGTHS, "prefixes": None, "window": None, "heads": (4, 2), "width": 64} | CASES[case]
    lengths, (heads, shared) = given["lengths"], given["heads"]
    torch.manual_seed(0)
    rounded = [
        torch.randn(1, h, sum(lengths), sized(given["width"], 8)).to(dtype) for h in (heads, shared, shared)
    ]
    upstream = torch.randn(1, sum(lengths), heads, rounded[0].shape[-1]).to(dtype)
    exact = [t.double().requires_grad_() for t in rounded]
    expected = by_rows(*exact, lengths, given["prefixes"], given["window"])
    expected_gradients = torch.autograd.grad(expected, exact, upstream.double())
    own = [t.to(DEVICE).requires_grad_() for t in rounded]
    found, _ = segment_sdpa(
        torch.nn.Identity(),
        *own,
        None,
        segments=Segments(lengths, given["prefixes"]),
        sliding_window=given["window"],
    )
    gradients = torch.autograd.grad(found, own, upstream.to(DEVICE))
    assert found.shape == expected.shape
    for name, got, right in zip(
        ("output", "query", "key", "value"),
        (found, *gradients),
        (expected, *expected_gradients),
        strict=True,
    ):
        measured[name] = distance(got.cpu(), right)
        assert measured[name] <= 4 * IN_KERNEL[dtype], name
    if IS_GPU:
        is_half = dtype != torch.float32
        assert attention._has_varlen(own[0], own[2]) == is_half, "half precision has one kernel for all"


NAMES = [
    "segment_sdpa",
    *(["flex_attention"] if IS_GPU else []),
    *(["flash_attention_2"] if IS_GPU and importlib.util.find_spec("flash_attn") else []),
    "sdpa",
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_every_attention_gives_a_model_the_log_probabilities_of_the_cpu(model, measured, name, dtype):
    if (name, dtype) == ("flash_attention_2", "float32"):
        pytest.skip("flash-attn has no float32")
    samples = samples_of(random_lengths(sized(5000, 150)))

    def logprobs(**changes):
        with open_learner(model, **changes) as learner:
            values = learner.own_logprobs(packed(learner, samples))
            return torch.cat([torch.tensor(v, dtype=torch.float64) for v in values])

    oracle = logprobs(device="cpu", attention="segment_sdpa", master=torch.float64)
    of_cpu = distance(logprobs(device="cpu", attention="segment_sdpa", dtype=dtype), oracle)
    measured["error"] = distance(logprobs(dtype=dtype, attention=name), oracle)
    assert measured["error"] <= 3 * of_cpu + FLOORS[dtype]


@pytest.mark.parametrize("num_segments", [1, 8, 64])
def test_time_of_packed_attention(measured, num_segments):
    """A figure, not a law: forward and backward of all segments at once, beside one after the other."""
    total, heads, shared, width = sized((8192, 14, 2, 64), (128, 4, 2, 8))
    segments = Segments([total // num_segments] * num_segments)
    dtype = sized(torch.bfloat16, torch.float32)
    tensors = [
        torch.randn(1, h, total, width, device=DEVICE, dtype=dtype, requires_grad=True)
        for h in (heads, shared, shared)
    ]

    def timed(call):
        for attempt in range(4):
            if attempt == 1:  # the first one chooses kernels
                started = time.perf_counter()
            out = call()
            torch.autograd.grad(out.sum(), tensors)
            if IS_GPU:
                torch.cuda.synchronize()
        return (time.perf_counter() - started) / 3 * 1e3

    measured["together ms"] = timed(
        lambda: segment_sdpa(torch.nn.Identity(), *tensors, None, segments=segments)[0]
    )
    measured["one by one ms"] = timed(lambda: attention._each(*tensors, segments, None, 0.0, None))
