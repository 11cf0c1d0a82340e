"""Speed of matrix products on one thread of this CPU."""

from __future__ import annotations

import time

import torch

NUM_ROWS = 256
MEASURE_S = 0.2


def measure_flops_per_s(num_inputs: int, num_outputs: int, *, dtype: str) -> float:
    """Return the operations per CPU second of a linear layer of this size, over some 0.2 s.

    CPU seconds, so that other programs matter little. `dtype`: name of a torch dtype.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(num_inputs, num_outputs, getattr(torch, dtype))
    finally:
        torch.set_num_threads(num_threads)


def _measured(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> float:
    rows, weight = (
        torch.ones(NUM_ROWS, num_inputs, dtype=dtype),
        torch.ones(num_outputs, num_inputs, dtype=dtype),
    )
    torch.nn.functional.linear(rows, weight)  # the first call chooses a kernel
    start, num_calls, elapsed_s = time.process_time(), 0, 0.0
    while elapsed_s < MEASURE_S:
        torch.nn.functional.linear(rows, weight)
        num_calls += 1
        elapsed_s = time.process_time() - start
    return 2.0 * NUM_ROWS * num_inputs * num_outputs * num_calls / elapsed_s
