"""Utilisation of the learner on random models with packed sequences of 8,192 tokens: figures, not laws."""

import math
import runpy
from pathlib import Path

import pytest
import torch

from parts.gpu import IS_GPU

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CASES = {
    "0.5b": (16, []),
    "0.5b compiled": (16, ["--compile", "--logprob-kernels=compiled"]),
    "1.5b": (40, ["--size=1.5b", "--gradient-checkpointing"]),
    "3b": (70, ["--size=3b", "--gradient-checkpointing"]),
    "7b adapter": (40, ["--size=7b", "--lora-rank=16", "--gradient-checkpointing"]),
    "7b": (135, ["--size=7b", "--gradient-checkpointing", "--microbatch-tokens=8192"]),
}
"""Memory of the GPU in GB that a case needs, and its options."""


@pytest.mark.timeout(580)
@pytest.mark.parametrize("case", CASES if IS_GPU else ["0.5b"])
def test_utilisation(case, measured, monkeypatch):
    needed, options = CASES[case]
    if IS_GPU and torch.cuda.get_device_properties(0).total_memory < needed * 1e9:
        pytest.skip(f"needs a GPU of {needed} GB")
    if "--lora-rank" in " ".join(options):
        pytest.importorskip("peft")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = runpy.run_path(str(BENCHMARKS / "gpu_step.py"))
    size = ["--tokens=65536"] if IS_GPU else ["--tokens=200", "--warmups=0", "--repeats=1"]
    result = benchmark["measure"](benchmark["parse"](["--length=8192", "--repeats=3", *options, *size]))
    for name in ("score", "update"):
        measured[f"{name} TFLOP/s"] = result[f"{name}_tflops"]
        if result[f"{name}_mfu"] is not None:
            measured[f"{name} MFU"] = result[f"{name}_mfu"]
        assert math.isfinite(result[f"{name}_tflops"])
    if IS_GPU:
        measured["GB"] = result["gpu_bytes_max"] / 1e9
