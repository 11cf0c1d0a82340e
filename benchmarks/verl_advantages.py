"""verl's side of advantages.py, run in an environment with verl: reads inputs, writes times and values."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig


def ppo_loss(
    inputs: np.lib.npyio.NpzFile, mask: torch.Tensor
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that computes verl's clipped loss and its gradient by the log-probabilities."""
    proximal, policy, advantages = (
        torch.from_numpy(inputs[name]) for name in ("proximal", "policy", "advantages")
    )
    policy.requires_grad_()
    config = ActorConfig(strategy="fsdp", rollout_n=8, ppo_micro_batch_size_per_gpu=1, clip_ratio=0.2)
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None
    )

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        policy.grad = None
        loss, _ = core_algos.compute_policy_loss_vanilla(
            proximal, policy, advantages, mask, "token-mean", config
        )
        loss.backward()
        return policy.grad, loss

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gamma", type=float, required=True)
    parser.add_argument("--lam", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    inputs = np.load(args.folder / "inputs.npz")
    rewards, values, mask = (torch.from_numpy(inputs[name]) for name in ("rewards", "values", "mask"))
    groups = inputs["groups"]
    labels = groups.astype(object)
    sides: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        "gae": lambda: core_algos.compute_gae_advantage_return(rewards, values, mask, args.gamma, args.lam),
        "grpo": lambda: core_algos.compute_grpo_outcome_advantage(rewards, mask, labels),
        "grpo_vectorized": lambda: core_algos.compute_grpo_vectorized_outcome_advantage(
            rewards, mask, groups
        ),
    }
    sides["ppo_loss"] = ppo_loss(inputs, mask)
    times = {}
    for name, run in sides.items():
        runs = []
        for _ in range(3 if name == "gae" else 30):
            started = time.process_time()
            found, _ = run()
            runs.append(1e3 * (time.process_time() - started))
        times[name] = min(runs)
        np.save(args.folder / f"{name}.npy", (found * mask).numpy())
    json.dump({"version": version("verl"), "ms": times}, sys.stdout)


if __name__ == "__main__":
    main()
