"""GPUs by name: what simulations and plans compute with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    flops_per_s: of dense products in bfloat16. bytes_per_s: of its memory. memory_gb: in 10^9 bytes.
    """

    flops_per_s: float
    bytes_per_s: float
    memory_gb: float


GPUS: Mapping[str, Gpu] = {
    "a100": Gpu(312e12, 2.039e12, 80),
    "h20": Gpu(148e12, 4.0e12, 96),
    "h100": Gpu(989e12, 3.35e12, 80),
    "h200": Gpu(989e12, 4.8e12, 141),
    "b200": Gpu(2250e12, 8.0e12, 180),
}
"""Source: data sheets of NVIDIA A100 80GB SXM, H20, H100 SXM, H200 SXM and HGX B200."""
