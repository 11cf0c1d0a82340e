"""Peak speed of matrix products of known GPUs: what utilisation (MFU) is measured against."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Peak:
    """Operations per second in dense products: bfloat16 and float16 in tensor cores, float32 without TF32."""

    half: float
    single: float


_PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"A100", Peak(312e12, 19.5e12)),
    (r"H100.*PCIe", Peak(756e12, 51e12)),
    (r"H100.*NVL", Peak(835e12, 60e12)),
    (r"H100.*HBM3", Peak(989e12, 67e12)),
    (r"H200.*NVL", Peak(836e12, 60e12)),
    (r"H200", Peak(989e12, 67e12)),
    (r"B200", Peak(2250e12, 75e12)),
    (r"L40S", Peak(362e12, 91.6e12)),
    (r"MI300X", Peak(1307e12, 163.4e12)),
)
"""By a part of the name that torch reports; the first match counts.

Source: data sheets of NVIDIA A100, H100 (SXM, PCIe, NVL), H200 (SXM, NVL), HGX B200 and L40S, and of AMD
Instinct MI300X. Where a sheet says "with sparsity", half of its figure.
"""
_NOT_WHOLE = re.compile(r"\bMIG\b|GB200")
"""A part of a GPU, or a GPU with other clocks than its namesake."""


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the operations per second that a device reaches at most; None on CPUs and unknown GPUs."""
    return find_peak(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def find_peak(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak of the GPU with this name, in dense products of `dtype`; None if it is not known.

    float32 has none while TF32 is allowed, whose rounding torch chooses by operator.
    """
    peak = next((own for pattern, own in _PEAKS if re.search(pattern, name)), None)
    if peak is None or _NOT_WHOLE.search(name):
        return None
    if dtype in (torch.bfloat16, torch.float16):
        return peak.half
    has_tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak.single if dtype == torch.float32 and not has_tf32 else None
