"""AdamW, its schedule, offloading of its state, and the global gradient norm over FSDP shards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from agentrl.config.learner import OptimizerConfig
from agentrl.learner.sharding import gather, mesh_of, own_part, with_part


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over all trainable weights; weight decay applies only to matrices, not biases and
    norms.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    is_one_mesh = len(_by_mesh(trained)) == 1
    # Steps of many weights in one operation cannot mix weights of two meshes. By default torch steps operator
    # by operator: on a CPU one fused pass takes a tenth of the time, and on a GPU the default needs as much
    # memory as another copy of the weights.
    is_fused = is_one_mesh and all(p.device.type in ("cpu", "cuda") for p in trained)
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        foreach=None if is_one_mesh and not is_fused else False,
        fused=is_fused,
    )


def learning_rate(update: int, config: OptimizerConfig, *, total_updates: int) -> float:
    """Return the learning rate of update `update` (from 0): linear warm-up to `lr`, then decay to 0.

    The decay ends at `total_updates`; the schedule `constant` does not decay. The rate depends on the update
    number alone, so a resumed run only needs its count.
    """
    if update < config.warmup_updates:
        return config.lr * (update + 1) / config.warmup_updates
    left = max(1, total_updates - config.warmup_updates)
    progress = min(1.0, (update - config.warmup_updates) / left)
    return config.lr * _DECAY[config.schedule](progress)


_DECAY = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


@contextmanager
def state_at_hand(
    optimizer: torch.optim.Optimizer, device: torch.device, *, is_offloaded: bool
) -> Iterator[None]:
    """Keep the optimizer's state on `device` inside the block and, if offloaded, on the CPU afterwards."""
    if not is_offloaded:
        yield
        return
    move_state(optimizer, device)
    yield
    move_state(optimizer, torch.device("cpu"))


def move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the state of every parameter, in place. Scalars such as step counters are not moved.

    From a GPU it is moved into pinned memory, to and from which a GPU copies several times as fast.
    """
    is_from_gpu = False
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.device.type != device.type:
                is_from_gpu |= value.is_cuda
                state[name] = _pinned(value) if value.is_cuda else value.to(device, non_blocking=True)
    if is_from_gpu:
        torch.cuda.synchronize()  # the copies may still be on their way


def _pinned(value: Tensor) -> Tensor:
    """Start copying a tensor of a GPU into pinned memory, sharded as it is."""
    own = own_part(value)[0]
    host = torch.empty_like(own, device="cpu", pin_memory=True)
    return with_part(value, host.copy_(own, non_blocking=True))


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients over all shards, 0-d and equal on every rank. A collective."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = [gather(torch.nn.utils.get_total_norm(own)) for own in _by_mesh(grads)]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def inner_product(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Return the float64 inner product of tensors that are sharded alike; equal on every rank.

    A collective.
    """
    products = [(a.double() * b.double()).sum() for a, b in zip(left, right, strict=True)]
    return sum(float(gather(torch.stack(own).sum())) for own in _by_mesh(products))


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float | None) -> None:
    """Scale all gradients so that their norm, given as `norm`, is at most `max_norm`; None: no clipping."""
    if max_norm is not None:
        for own in _by_mesh(p for p in parameters if p.grad is not None):
            torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device mesh: one operation cannot mix DTensors of two meshes."""
    groups: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(mesh_of(tensor), []).append(tensor)
    return list(groups.values())
