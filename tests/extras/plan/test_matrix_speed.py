"""The measured speed of matrix products, which `config explain` reports."""

from __future__ import annotations

import time

import torch

from agentrl.extras.plan.matrix_speed import MEASURE_S, measure_flops_per_s


def test_the_speed_is_that_of_one_thread_and_the_number_of_threads_stays():
    before = torch.get_num_threads()
    start = time.process_time()
    flops_per_s = measure_flops_per_s(64, 128, dtype="float32")
    assert time.process_time() - start < 10 * MEASURE_S
    assert 1e8 < flops_per_s < 1e12, "one CPU thread"
    assert torch.get_num_threads() == before
