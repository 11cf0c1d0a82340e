"""verl's side of advantages.py, run by an environment in which verl is installed: reads its inputs, writes times and values."""

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
        "grpo_vectorized": lambda: core_algos.compute_grpo_vectorized_outcome_advantage(rewards, mask, groups),
    }
    times = {}
    for name, run in sides.items():
        runs = []
        for _ in range(3 if name == "gae" else 15):
            started = time.perf_counter()
            advantages, _ = run()
            runs.append(1e3 * (time.perf_counter() - started))
        times[name] = min(runs)
        np.save(args.folder / f"{name}.npy", (advantages * mask).numpy())
    json.dump({"version": version("verl"), "ms": times}, sys.stdout)


if __name__ == "__main__":
    main()
