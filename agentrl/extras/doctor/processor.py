"""Check `processor`: torch, its threads, and how fast it multiplies matrices on the CPU."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.algorithms.linear_kernels import OneDnnLinear, use_linear_kernels
from agentrl.extras.doctor.cpu_peak import CorePeak, read_peak
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject
from agentrl.extras.plan.matrix_speed import measure_flops_per_s
from agentrl.granted import Granted, granted

SIZE = 1024
"""Rows and columns of the measured layers: as in models of 0.5 billion parameters."""
MIN_PEAK_SHARE = 0.3
"""Of what a core computes at its listed clock. A library for the core reaches 0.5 to 1.2, one without its
vector instructions 0.2 at most."""
BETTER = 1.3
"""A library that is so many times as fast is worth a change of the config."""
MIN_SCALING = 0.5
"""Of the CPUs that work at once, the share that must add to the speed."""
TOGETHER_S = 0.4
_CPUINFO = Path("/proc/cpuinfo")
_MAX_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")


@dataclass(frozen=True, slots=True)
class ProductSpeeds:
    """Operations per second in products on one thread.

    torch: of torch's own library. onednn: None if this torch was built without it. is_onednn: which of both
    `learner.linear_kernels` chooses.
    """

    torch: float
    onednn: float | None
    is_onednn: bool

    @property
    def in_use(self) -> float:
        return self.onednn if self.is_onednn and self.onednn is not None else self.torch


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Load torch and measure products: by one thread in both libraries, by all threads, and in bfloat16."""
    yield judge_threads(torch.get_num_threads(), granted(), torch.__version__)
    speeds = measure_products(subject)
    yield judge_products(speeds, _core())
    yield _judge_together(speeds)
    config = subject.config
    if config.model.dtype != "float32" and config.placement.device_of("actor") == "cpu":
        speed = measure_flops_per_s(SIZE, SIZE, dtype=config.model.dtype)
        yield judge_dtype(config.model.dtype, speed, speeds.in_use)


def judge_threads(num_threads: int, grant: Granted, version: str) -> Diagnosis:
    """Compare torch's threads with the CPUs that this process may use."""
    text = (
        f"torch {version}, {num_threads} threads; {grant.num_cpus} of {grant.machine_cpus} CPUs "
        f"({grant.cpu_source})"
    )
    if num_threads > grant.num_cpus:
        return Diagnosis("torch", "slow", text, f"OMP_NUM_THREADS={grant.num_cpus}; more threads wait")
    return Diagnosis("torch", "ok", text)


def measure_products(subject: Subject) -> ProductSpeeds:
    """Measure float32 products on one thread in torch's library and in oneDNN."""
    layer = torch.nn.Linear(1, 1)
    use_linear_kernels(layer, subject.config.learner.linear_kernels, device="cpu")
    has_onednn = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return ProductSpeeds(
        measure_flops_per_s(SIZE, SIZE, dtype="float32"),
        measure_flops_per_s(SIZE, SIZE, dtype="float32", kernels="onednn") if has_onednn else None,
        isinstance(layer, OneDnnLinear),
    )


def judge_products(speeds: ProductSpeeds, core: CorePeak | None) -> Diagnosis:
    """Compare the library in use with the other one, and with what the core should reach."""
    blas = _blas(torch.__config__.show())
    rates = {blas: speeds.torch} | ({} if speeds.onednn is None else {"oneDNN": speeds.onednn})
    used = "oneDNN" if speeds.is_onednn else blas
    listed = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items())
    text = f"{used} multiplies; GFLOP/s of one thread: {listed}"
    figures = {f"{name}_gflops_per_s": rate / 1e9 for name, rate in rates.items()}
    if core is not None:
        text += f"; a core of {core.model} ({core.feature}, {core.clock_hz / 1e9:.1f} GHz) has "
        text += f"{core.flops_per_s / 1e9:.0f}"
        figures["peak_gflops_per_s"] = core.flops_per_s / 1e9
    if max(rates.values()) > BETTER * speeds.in_use:
        faster = "torch" if speeds.is_onednn else "onednn"
        cure = f"learner.linear_kernels={faster} and rollout.embedded.linear_kernels={faster}"
        return Diagnosis("products", "slow", text, cure, figures)
    if core is not None and speeds.in_use < MIN_PEAK_SHARE * core.flops_per_s:
        cure = (
            "look for other programs (`top`), a laptop's power saving, a virtual machine that hides CPU "
            "features, or a torch that was not built for this CPU"
        )
        return Diagnosis("products", "slow", text, cure, figures)
    return Diagnosis("products", "ok", text, figures=figures)


def judge_dtype(dtype: str, speed: float, single: float) -> Diagnosis:
    """Compare the config's number format with float32 on this CPU."""
    text = f"{dtype}: {speed / 1e9:.0f} GFLOP/s on one thread, float32 {single / 1e9:.0f}"
    figures = {f"{dtype}_gflops_per_s": speed / 1e9}
    if single > BETTER * speed:
        return Diagnosis("number format", "slow", text, "model.dtype=float32 on this CPU", figures)
    return Diagnosis("number format", "ok", text, figures=figures)


def _judge_together(speeds: ProductSpeeds) -> Diagnosis:
    num_cpus, load = granted().num_cpus, os.getloadavg()[0]
    ratio = _speed_together(num_cpus) / speeds.torch
    text = f"{num_cpus} threads multiply {ratio:.1f} times as fast as one; load {load:.1f}"
    figures = {"speedup": ratio, "load": load}
    if num_cpus > 1 and ratio < MIN_SCALING * num_cpus:
        cure = "end other programs; CPUs that are threads of one core add little"
        return Diagnosis("all CPUs", "slow", text, cure, figures)
    return Diagnosis("all CPUs", "ok", text, figures=figures)


def _speed_together(num_threads: int) -> float:
    """Return the operations per second of a large product on several threads."""
    left, right = torch.ones(SIZE, SIZE), torch.ones(SIZE, SIZE)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        torch.mm(left, right)
        start, num_calls, elapsed_s = time.monotonic(), 0, 0.0
        while elapsed_s < TOGETHER_S:
            torch.mm(left, right)
            num_calls += 1
            elapsed_s = time.monotonic() - start
    finally:
        torch.set_num_threads(before)
    return 2.0 * SIZE**3 * num_calls / elapsed_s


def _core() -> CorePeak | None:
    if not _CPUINFO.is_file():
        return None
    max_clock = _MAX_CLOCK.read_text() if _MAX_CLOCK.is_file() else ""
    return read_peak(_CPUINFO.read_text(errors="replace"), max_clock)


def _blas(description: str) -> str:
    found = re.search(r"BLAS_INFO=(\w+)", description)
    return found[1].upper() if found else "torch"
