"""What all that is computed of a log-ratio shares: its bound before exp, and where it is nothing but rounding noise.

A log-ratio that is 0 on paper (at the first update of a step, where policy and proximal policy are one) is of the size of a rounding
error in fact, and its sign is that of the CPU or GPU, the packing and the library. Nothing may follow from that sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to [-20, 20] before exp: e^20 is far above any cap, and finite in every dtype but float16."""

ROUNDING = 1e-4
"""Nats. Two float32 forwards of one token on different shapes or CPUs differ by 1e-7 to 1e-5; an update that matters moves more."""


def bounded(log_ratios: Tensor) -> Tensor:
    """Return the log-ratios clamped to [-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT], with no gradient beyond."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def distance(log_ratios: Tensor) -> Tensor:
    """Return |log-ratio|, and 0 with gradient 0 where it is at most ROUNDING.

    0 is a subgradient of |x| at 0; without the band, noise would choose between -1 and 1.
    """
    return log_ratios * torch.where(log_ratios.abs() > ROUNDING, log_ratios.detach().sign(), 0.0)


def off_rounding(values: Tensor) -> Tensor:
    """Return f64, `values` in whole multiples of ROUNDING: numbers that are equal on paper become equal."""
    return torch.round(values.double() / ROUNDING) * ROUNDING
