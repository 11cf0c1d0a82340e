"""Offloading of the optimizer's state to the CPU between updates, to free GPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def state_at_hand(optimizer: torch.optim.Optimizer, device: torch.device, *, is_offloaded: bool) -> Iterator[None]:
    """Keep the optimizer's state on `device` inside the block and on the CPU afterwards, if offloaded."""
    if not is_offloaded:
        yield
        return
    move_state(optimizer, device)
    yield
    move_state(optimizer, torch.device("cpu"))


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state of every parameter, in place. Scalars such as step counters are not moved."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                state[name] = value.to(device)
