"""The optimizer's state between updates: on the CPU, where a GPU has better use for its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def state_at_hand(optimizer: torch.optim.Optimizer, device: torch.device, *, is_offloaded: bool) -> Iterator[None]:
    """Have the optimizer's state on `device` for the block, and on the CPU behind it, if it is offloaded at all."""
    if not is_offloaded:
        yield
        return
    move_state(optimizer, device)
    yield
    move_state(optimizer, torch.device("cpu"))


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state of every parameter, in place; counters stay where they are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                state[name] = value.to(device)
