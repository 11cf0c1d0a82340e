"""AdamW, its schedule, and the global gradient norm over FSDP shards."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.config.schema import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over what is not frozen; weight decay acts on matrices only, not on biases and norms."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps)


def learning_rate(update: int, config: OptimizerConfig, *, total_updates: int) -> float:
    """Return the learning rate of update number `update` (from 0): linear warm-up to `lr`, then decay to 0 at `total_updates`.

    A function of the update alone, so that a resumed run needs nothing but its count.
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


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients over all shards, 0-d and equal on every rank. A collective."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float | None) -> None:
    """Scale all gradients so that their norm, given as `norm`, is at most `max_norm`; None: leave them."""
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
