"""Speed of matrix products on one thread of this CPU."""

from __future__ import annotations

import time

import torch
from torch import nn

from agentrl.algorithms.linear_kernels import LinearKernels, multiplication_of, use_linear_kernels

NUM_ROWS = 256
MEASURE_S = 0.2


def measure_flops_per_s(
    num_inputs: int, num_outputs: int, *, dtype: str, kernels: LinearKernels = "torch"
) -> float:
    """Return the operations per CPU second of a linear layer of this size, over some 0.2 s.

    CPU seconds, so that other programs matter little. `dtype`: name of a torch dtype.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(num_inputs, num_outputs, getattr(torch, dtype), kernels)
    finally:
        torch.set_num_threads(num_threads)


def _measured(num_inputs: int, num_outputs: int, dtype: torch.dtype, kernels: LinearKernels) -> float:
    layer = nn.Linear(num_inputs, num_outputs, bias=False, dtype=dtype).requires_grad_(False)
    rows = torch.ones(NUM_ROWS, num_inputs, dtype=dtype)
    nn.init.ones_(layer.weight)
    use_linear_kernels(layer, kernels, device="cpu")
    multiply = multiplication_of(layer, rows)
    multiply(rows, layer.weight, None)  # the first call chooses a kernel
    start, num_calls, elapsed_s = time.process_time(), 0, 0.0
    while elapsed_s < MEASURE_S:
        multiply(rows, layer.weight, None)
        num_calls += 1
        elapsed_s = time.process_time() - start
    return 2.0 * NUM_ROWS * num_inputs * num_outputs * num_calls / elapsed_s
