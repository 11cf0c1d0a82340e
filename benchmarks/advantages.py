"""Time of advantages and PPO loss, on one thread: ours on action tokens, verl's on padded [64, 8192] arrays.

Both sides get the same multi-turn rewards, values and masks, in one run. verl runs in its own environment
(`--peers`) and is reported as missing without one. GAE is whitened, as always in verl. The loss is the mean
over tokens, with its gradient. The values must agree. Times are CPU times, so that other work on the machine
does not count.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import write_result
from numpy.typing import NDArray

from agentrl.algorithms.advantages.reinforce import whiten
from agentrl.algorithms.aggregation import Aggregation, UpdateCounts, token_scales
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, Credit
from agentrl.algorithms.policy_losses import PolicyTokens, ppo_clip
from agentrl.algorithms.registry import find_estimator
from agentrl.algorithms.rules import ClipConfig
from agentrl.config.estimators import GROUP
from agentrl.registered import names_of_ours

ESTIMATORS = {name: find_estimator(name).function for name in names_of_ours(GROUP)}
BATCH, COLUMNS, GROUP_SIZE = 64, 8192, 8
GAMMA, LAM = 0.99, 0.95
REPEATS = 30
WANTED = {
    "gae": ("gae", 20.0),
    "grpo": ("grpo", 1.0),
    "grpo_vectorized": ("grpo", 1.0),
    "ppo_loss": ("ppo_loss", 1.0),
}
"""verl's function -> our estimator, and its minimum speedup."""

OPTIONS = AdvantageOptions(
    gamma=GAMMA,
    lam=LAM,
    bootstrap_truncated=False,
    singleton="zero",
    passk_k=4,
    solved_reward=1.0,
    step_weight=1.0,
)


def make_inputs(seed: int) -> dict[str, NDArray[Any]]:
    """Return padded arrays [BATCH, COLUMNS]: model and tool spans alternate; the last action has a reward."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((BATCH, COLUMNS), np.float32)
    for row in mask:
        length, place = int(rng.integers(COLUMNS // 4, COLUMNS + 1)), 0
        while place < length:
            span = int(rng.integers(32, 512))
            row[place : min(length, place + span)] = 1
            place += span + int(rng.integers(16, 256))
    rewards = np.zeros_like(mask)
    rewards[np.arange(BATCH), COLUMNS - 1 - mask[:, ::-1].argmax(axis=1)] = rng.random(BATCH)
    values = 0.1 * rng.standard_normal(mask.shape, np.float32)
    proximal = -3.0 * rng.random(mask.shape, np.float32)
    policy = proximal + 0.3 * rng.standard_normal(mask.shape, np.float32)
    advantages = rng.standard_normal(mask.shape, np.float32)
    inputs = {"rewards": rewards, "values": values, "mask": mask, "groups": np.arange(BATCH) // GROUP_SIZE}
    return inputs | {"proximal": proximal, "policy": policy, "advantages": advantages}


def compact(inputs: dict[str, NDArray[Any]], dtype: torch.dtype) -> ActionBatch:
    mask = inputs["mask"] > 0
    return ActionBatch.of_tokens(
        rewards_A=torch.from_numpy(inputs["rewards"][mask]).to(dtype),
        turn_A=torch.from_numpy((np.cumsum(np.diff(mask, axis=1, prepend=False), axis=1) // 2)[mask]),
        num_tokens_N=torch.from_numpy(mask.sum(axis=1)),
        group_N=torch.from_numpy(inputs["groups"]),
        is_truncated_N=torch.zeros(BATCH, dtype=torch.bool),
        group_size=GROUP_SIZE,
        values_A=torch.from_numpy(inputs["values"][mask]).to(dtype),
    )


def measure_ours(
    inputs: dict[str, NDArray[Any]], dtype: torch.dtype
) -> tuple[dict[str, float], dict[str, NDArray[Any]]]:
    """Return the best time of each estimator in ms, and the values of those that verl also has."""
    batch = compact(inputs, dtype)

    def whitened_gae(batch: ActionBatch) -> Credit:
        return Credit(whiten(ESTIMATORS["gae"](batch, OPTIONS).advantages_A))

    needless = {"remax", "gigpo"}  # they need inputs that verl's functions do not get
    sides = {
        name: functools.partial(ESTIMATORS[name], options=OPTIONS)
        for name in ESTIMATORS
        if name not in needless
    }
    times = {name: best_ms(run, batch) for name, run in {**sides, "gae": whitened_gae}.items()}
    loss = ppo_loss(inputs, dtype)
    times["ppo_loss"] = best_ms(lambda batch: loss(), batch)
    values = {
        "gae": whitened_gae(batch).advantages_A.numpy(),
        "grpo": sides["grpo"](batch).advantages_A.numpy(),
    }
    return times, values | {"ppo_loss": loss().numpy()}


def ppo_loss(inputs: dict[str, NDArray[Any]], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Return a function that computes our clipped loss, a mean over tokens.

    It returns the gradient by the log-probabilities, f[A].
    """
    mask = inputs["mask"] > 0
    proximal, policy, advantages = (
        torch.from_numpy(inputs[name][mask]).to(dtype) for name in ("proximal", "policy", "advantages")
    )
    policy.requires_grad_()
    ids = torch.from_numpy(np.repeat(np.arange(BATCH), mask.sum(axis=1)))
    clip = ClipConfig(0.2, 0.2, 3.0)
    counts = UpdateCounts(len(ids), BATCH)

    def run() -> torch.Tensor:
        policy.grad = None
        losses = ppo_clip(PolicyTokens(policy, proximal, advantages, ids), clip=clip).losses_A
        (losses * token_scales(Aggregation("token_mean"), ids, counts, dtype=dtype)).sum().backward()
        assert policy.grad is not None
        return policy.grad

    return run


def best_ms(run: Callable[[ActionBatch], object], batch: ActionBatch) -> float:
    runs = []
    for _ in range(REPEATS):
        fresh = replace(batch)  # a batch caches its sums
        started = time.process_time()
        run(fresh)
        runs.append(1e3 * (time.process_time() - started))
    return min(runs)


def measure_verl(
    inputs: dict[str, NDArray[Any]], python: Path
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | str:
    """Return verl's times and values on the same inputs, or why there are none."""
    if not python.exists():
        return "not installed"
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "inputs.npz", **inputs)
        script = Path(__file__).with_name("verl_advantages.py")
        command = [str(python), str(script), folder, "--gamma", str(GAMMA), "--lam", str(LAM)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode != 0:
            return f"failed: {(done.stderr.strip().splitlines() or [str(done.returncode)])[-1]}"
        report = json.loads(done.stdout.strip().splitlines()[-1])
        return report, {name: np.load(Path(folder) / f"{name}.npy") for name in WANTED}


def compare(peers: Path) -> dict[str, Any]:
    inputs = make_inputs(0)
    mask = inputs["mask"] > 0
    ours = {
        str(dtype).removeprefix("torch."): measure_ours(inputs, dtype)
        for dtype in (torch.float32, torch.float64)
    }
    print(f"{BATCH} x {COLUMNS}, {int(mask.sum()):,} action tokens, one thread")
    for name in ours["float32"][0]:
        print(
            f"  {name:<30}", "  ".join(f"{dtype} {times[name]:7.2f} ms" for dtype, (times, _) in ours.items())
        )
    result: dict[str, Any] = {"ours_ms": {dtype: times for dtype, (times, _) in ours.items()}}
    verl = measure_verl(inputs, peers / "peers_rl_venv" / "bin" / "python")
    if isinstance(verl, str):
        print(f"verl: no figure, it is {verl}")
        return {**result, "verl": verl}
    report, values = verl
    result |= {"verl": report, "ratios": {}, "largest_difference": {}}
    for name, (own, wanted) in WANTED.items():
        times, own_values = ours["float32"]
        ratio = report["ms"][name] / times[own]
        difference = float(np.abs(values[name][mask] - own_values[own]).max())
        result["ratios"][name], result["largest_difference"][name] = ratio, difference
        print(
            f"  {own} against verl {report['version']} {name} ({report['ms'][name]:.1f} ms): {ratio:.1f} "
            f"times as fast (wanted: at least {wanted:g}), values differ by at most {difference:.1e}"
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--peers",
        type=Path,
        default=Path(os.environ.get("PEERS_ROOT", "~/.cache/agentrl-peers")).expanduser(),
    )
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = compare(args.peers)
    write_result(args.out, result)


if __name__ == "__main__":
    main()
