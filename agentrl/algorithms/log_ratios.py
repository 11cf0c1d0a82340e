"""Numerics shared by all log-ratios: the clamp before exp, and the band where they are only rounding noise.

A log-ratio can be 0 in theory, for example at the first update of a step, where policy and proximal policy
are equal. In practice it then has the size of a rounding error, and its sign depends on the device, the
packing and the library. No result may depend on that sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to [-20, 20] before exp: e^20 is far above any cap, and finite in every dtype but
float16.
"""

ROUNDING = 1e-4
"""In nats. Two float32 forwards of one token with different shapes or CPUs differ by 1e-7 to 1e-5.

A relevant update changes the log-ratio by more.
"""


def bounded(log_ratios: Tensor) -> Tensor:
    """Return the log-ratios clamped to [-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT]; the gradient is 0 outside."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def distance(log_ratios: Tensor) -> Tensor:
    """Return |log-ratio|, or 0 with gradient 0 where it is at most ROUNDING.

    0 is a subgradient of |x| at 0. Without the band, noise would choose between the gradients -1 and 1.
    """
    return log_ratios * torch.where(log_ratios.abs() > ROUNDING, log_ratios.detach().sign(), 0.0)


def off_rounding(values: Tensor) -> Tensor:
    """Return f64, `values` rounded to multiples of ROUNDING: values equal up to noise become equal."""
    return torch.round(values.double() / ROUNDING) * ROUNDING
