"""Texts about how fast the learner computes and how much memory it needs, from the metrics of a step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from agentrl.tracking.metrics import StepRecord

MFU = "learner/update_mfu"
_FLOPS = "learner/update_flops_per_s"
_FLOPS_OF_RANK = "learner/update_flops_per_s_per_rank"
_TOKENS = "learner/update_tokens_per_s"
_TOKENS_OF_GPU = "learner/update_tokens_per_gpu_s"
_ON_GPU = "learner/memory/update_gpu_bytes_max"
_ON_HOST = "learner/memory/rss_bytes_max"
_PREDICTED = "learner/memory/update_predicted_bytes_max"
_NAMES = (MFU, _FLOPS, _FLOPS_OF_RANK, _TOKENS, _TOKENS_OF_GPU, _ON_GPU, _ON_HOST, _PREDICTED)
_GIB = 1 << 30
_UNITS = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))


def compute_text(values: Mapping[str, float]) -> str:
    """Return the speed of updates, their utilisation of the GPUs, and their memory; parts that are not known
    are left out.
    """
    parts = []
    if _TOKENS in values:
        of_gpu = f" ({values[_TOKENS_OF_GPU]:,.0f} per GPU)" if _TOKENS_OF_GPU in values else ""
        parts.append(f"{values[_TOKENS]:,.0f} tokens/s{of_gpu}")
    if _FLOPS in values:
        has_ranks = values[_FLOPS_OF_RANK] < values[_FLOPS]
        of_rank = f" ({_speed(values[_FLOPS_OF_RANK])} per rank)" if has_ranks else ""
        parts.append(f"{_speed(values[_FLOPS])}{of_rank}")
    if MFU in values:
        parts.append(f"MFU {values[MFU]:.1%}")
    peak = values.get(_ON_GPU, values.get(_ON_HOST))
    if peak is not None:
        predicted = f" (predicted {values[_PREDICTED] / _GIB:.1f})" if _PREDICTED in values else ""
        parts.append(f"peak {peak / _GIB:.1f} GiB{predicted}")
    return "   ".join(parts)


def typical_compute_text(records: Sequence[StepRecord]) -> str:
    """Return `compute_text` of the medians over all training steps; empty without steps."""
    steps = [record.values for record in records if record.kind == "train"]
    found = {name: [values[name] for values in steps if name in values] for name in _NAMES}
    return compute_text({name: statistics.median(own) for name, own in found.items() if own})


def _speed(flops_per_s: float) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if flops_per_s >= unit), _UNITS[-1])
    return f"{flops_per_s / unit:,.1f} {name}"
