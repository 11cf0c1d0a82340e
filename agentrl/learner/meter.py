"""Measurement of a rank's phases: seconds, tokens, memory, and on request a trace of torch's profiler."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from agentrl.learner.ranks import RankPlace, add_over_ranks, largest_over_ranks


class Meter:
    """Measures named phases until `finish`.

    The names also appear in traces of torch's profiler and Nsight (NVTX).
    """

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._is_gpu = place.device.type == "cuda"
        self._profiler: profile | None = None
        self._reset()

    @contextmanager
    def phase(self, name: str, *, num_tokens: int) -> Iterator[None]:
        """Measure the block as part of a phase, in which `num_tokens` tokens go through this rank's model."""
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(self._place.device)
        started = time.perf_counter()
        with record_function(name), torch.cuda.nvtx.range(name) if self._is_gpu else nullcontext():
            yield
        if self._is_gpu:
            torch.cuda.synchronize(self._place.device)  # kernels may still be running
            self._peaks[name] = max(
                self._peaks[name], float(torch.cuda.max_memory_allocated(self._place.device))
            )
        self._seconds[name] += time.perf_counter() - started
        self._tokens[name] += num_tokens

    def finish(self) -> dict[str, float]:
        """Return the measurements since the last call, over all ranks, and reset them. A collective.

        Per phase: `<phase>_s` (of the slowest rank), `<phase>_tokens_per_s` (of all ranks together) and, on
        GPUs, `memory/<phase>_gpu_bytes_max`. `memory/rss_bytes_max` is a process's peak since its start.
        Memory values are the maximum over ranks.
        """
        seconds = largest_over_ranks({f"{name}_s": s for name, s in self._seconds.items()})
        tokens = add_over_ranks(dict(self._tokens))
        peaks = {f"memory/{name}_gpu_bytes_max": peak for name, peak in self._peaks.items()}
        speeds = {
            f"{name}_tokens_per_s": count / max(seconds[f"{name}_s"], 1e-9) for name, count in tokens.items()
        }
        values = seconds | speeds | largest_over_ranks(peaks | {"memory/rss_bytes_max": _largest_rss_bytes()})
        self._reset()
        return values

    def start_trace(self) -> None:
        """Start recording every operator of this rank; this slows it down."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_gpu else [])]
        self._profiler = profile(activities=activities, profile_memory=True)
        self._profiler.start()

    def write_trace(self, folder: Path) -> None:
        """Stop recording and write `rank<rank>.json.gz`, for Perfetto or chrome://tracing."""
        assert self._profiler is not None, "write_trace before start_trace"
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank{self._place.rank}.json.gz"))

    def _reset(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tokens: defaultdict[str, float] = defaultdict(float)
        self._peaks: defaultdict[str, float] = defaultdict(float)


def _largest_rss_bytes() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
