"""Measurement of a rank's phases: seconds, tokens, operations, memory, and a trace of torch's profiler."""

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

    peak_flops_per_s: of this rank's device in the dtype of its products; None: not known.
    """

    def __init__(self, place: RankPlace, *, peak_flops_per_s: float | None = None) -> None:
        self._place = place
        self._peak_flops_per_s = peak_flops_per_s
        self._is_gpu = place.device.type == "cuda"
        self._profiler: profile | None = None
        self._reset()

    @contextmanager
    def phase(
        self, name: str, *, num_tokens: int, num_flops: float = 0.0, predicted_bytes: float = 0.0
    ) -> Iterator[None]:
        """Measure the block as part of a phase.

        num_tokens: tokens that go through this rank's model; num_flops: operations that it needs for them, 0
        if they are not known. Ranks that share microbatches pass those of the whole. predicted_bytes: the
        memory that the phase should need at its peak; 0: not known.
        """
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
        self._flops[name] += num_flops
        self._predicted[name] = max(self._predicted[name], predicted_bytes)

    def finish(self) -> dict[str, float]:
        """Return the measurements since the last call, over all ranks, and reset them. A collective.

        Per phase: `<phase>_s` (of the slowest rank) and `<phase>_tokens_per_s` (of all ranks together); for a
        model whose operations are known, `<phase>_flops_per_s` (of all ranks together) and
        `<phase>_flops_per_s_per_rank`; on GPUs `<phase>_tokens_per_gpu_s` and
        `memory/<phase>_gpu_bytes_max`; on GPUs whose peak is known `<phase>_mfu`, the share of it.
        `memory/rss_bytes_max` is a process's peak since its start, and `memory/<phase>_predicted_bytes_max`
        what a phase should need. Memory values are the maximum over ranks.
        """
        seconds = largest_over_ranks({f"{name}_s": s for name, s in self._seconds.items()})
        counted = add_over_ranks(
            {f"{name} tokens": count for name, count in self._tokens.items()}
            | {f"{name} flops": count for name, count in self._flops.items()}
        )
        values = dict(seconds)
        for name in self._tokens:
            spent = max(seconds[f"{name}_s"], 1e-9)
            values |= self._speeds(name, counted[f"{name} tokens"] / spent, counted[f"{name} flops"] / spent)
        peaks = {f"memory/{name}_gpu_bytes_max": peak for name, peak in self._peaks.items()}
        predicted = {f"memory/{name}_predicted_bytes_max": size for name, size in self._predicted.items()}
        memory = largest_over_ranks(peaks | predicted | {"memory/rss_bytes_max": _largest_rss_bytes()})
        values |= {name: size for name, size in memory.items() if size > 0}
        self._reset()
        return values

    def _speeds(self, name: str, tokens_per_s: float, flops_per_s: float) -> dict[str, float]:
        found = {f"{name}_tokens_per_s": tokens_per_s}
        if self._is_gpu:
            found[f"{name}_tokens_per_gpu_s"] = tokens_per_s / self._place.world_size
        if flops_per_s > 0:
            of_rank = flops_per_s / self._place.world_size
            found |= {f"{name}_flops_per_s": flops_per_s, f"{name}_flops_per_s_per_rank": of_rank}
            if self._peak_flops_per_s is not None:
                found[f"{name}_mfu"] = of_rank / self._peak_flops_per_s
        return found

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
        self._flops: defaultdict[str, float] = defaultdict(float)
        self._peaks: defaultdict[str, float] = defaultdict(float)
        self._predicted: defaultdict[str, float] = defaultdict(float)


def _largest_rss_bytes() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
