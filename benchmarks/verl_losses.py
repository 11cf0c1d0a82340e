"""Compare the loss and gradient that `config import` makes of verl's settings with those of verl's functions.

Both sides compute in one process, in float64: `--verl` names the site-packages of an environment with verl
0.9.1 and the torch of this one. The log-probabilities and settings are those of
tests/extras/verl/test_verl_mathematics.py; without `--verl`, its formulas stand in for verl's functions.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import ROOT, write_result

sys.path.insert(0, str(ROOT / "tests"))

from agentrl.config.learner import LearnerConfig
from agentrl.config.schema import Config
from agentrl.learner.ranks import join_ranks, leave_ranks
from extras.verl import test_verl_mathematics as cases
from parts.learner import reserved_port

AGGREGATIONS = (*cases.AGGREGATIONS, "token-sum")
MODES: list[dict[str, Any]] = [
    *({"loss_mode": mode, **options} for mode, found in cases.MODES.items() for options in found),
    *cases.COVARIANCES,
    *({"loss_mode": mode} for mode in ("dppo_kl", "dro")),
]
KINDS = (
    "low_var_kl",
    "k3",
    "low_var_kl+",
    "k3+",
    "mse",
    "k2",
    "mse+",
    "abs",
    "abs+",
    "kl",
    "k1",
    "kl+",
    "k1+",
)
Expect = Callable[[dict[str, Any], tuple[np.ndarray, ...]], tuple[float, np.ndarray]]
"""Computes loss and gradient of verl's keys from the columns of a case."""
KINDS_OF_KL = (*KINDS, "full")
TOLERANCE = 1e-5
NUM_CASES = 3
TINY = 1e-12


@dataclass(frozen=True)
class Row:
    """One setting of verl, compared.

    Attributes:
        gradient_ratio: of ours to verl's, along verl's; None if there is nothing to compare.
        difference: the greatest of an element of the gradient, in parts of the greatest of verl's.
    """

    name: str
    verls_loss: float | None
    our_loss: float | None
    gradient_ratio: float | None
    difference: float | None
    verdict: str
    reason: str = ""


def settings() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the table, a name and the keys of verl of each case."""
    for how, mode in itertools.product(AGGREGATIONS, MODES):
        yield "modes", f"{named(mode)}, {how}", {"loss_agg_mode": how, **mode}
    for (name, preset), how in itertools.product(cases.PRESETS.items(), AGGREGATIONS):
        yield "presets", f"{name}, {how}", {"loss_agg_mode": how, **preset}
    for kind, how in itertools.product(KINDS_OF_KL, AGGREGATIONS):
        yield "KL", f"{kind}, {how}", {"loss_agg_mode": how, **cases.KL, "kl_loss_type": kind}
    for (name, preset), how, mode in itertools.product(cases.PRESETS.items(), AGGREGATIONS, MODES):
        is_other = mode["loss_mode"] != "vanilla" and not preset.get("bypass_mode")
        if preset and is_other:
            yield (
                "presets with modes",
                f"{name}, {named(mode)}, {how}",
                {"loss_agg_mode": how, **preset, **mode},
            )
    for options in cases.COVARIANCES:
        yield "several updates", named(options), {**options, "ppo_mini_batch_size": 4}
    for name, preset in cases.PRESETS.items():
        if "bypass_mode" in preset and "rollout_rs" in preset:
            yield "several updates", name, {**preset, "ppo_mini_batch_size": 4}
    for (name, preset), how in itertools.product(cases.PRESETS.items(), AGGREGATIONS):
        if preset:
            yield "presets with KL", f"{name}, mse, {how}", {"loss_agg_mode": how, **preset, **cases.KL}


def named(mode: dict[str, Any]) -> str:
    return " ".join(str(value) if key == "loss_mode" else f"{key}={value}" for key, value in mode.items())


def of_formulas(options: dict[str, Any], columns: tuple[np.ndarray, ...]) -> tuple[float, np.ndarray]:
    """Return loss and gradient by the formulas of the test."""
    now = cases.f64(columns[0]).requires_grad_()
    loss = cases.verl_loss(cases.DEFAULTS | options, now, *map(cases.f64, columns[1:]))
    loss.backward()
    return loss.item(), now.grad.numpy() * cases.MASK


def verls(options: dict[str, Any], columns: tuple[np.ndarray, ...]) -> tuple[float, np.ndarray]:
    """Return loss and gradient by verl's functions, as its trainer and its actor call them."""
    from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    o = cases.DEFAULTS | {"loss_mode": "vanilla"} | options
    now, old, served, advantages, reference = (cases.f64(column) for column in columns)
    now.requires_grad_()
    mask = torch.tensor(cases.MASK)
    keys = (
        "rollout_is",
        "rollout_is_threshold",
        "rollout_is_batch_normalize",
        "rollout_rs",
        "rollout_rs_threshold",
    )
    correction = {key: o[key] for key in keys if key in o}
    mode, weights, num_tokens = o["loss_mode"], None, int(mask.sum())
    if o.get("bypass_mode"):
        mode, old = "bypass_mode", served
    elif correction.get("rollout_is") or correction.get("rollout_rs"):
        found, mask, _ = compute_rollout_correction_and_rejection_mask(
            old_log_prob=old, rollout_log_prob=served, response_mask=mask, **correction
        )
        weights = None if found is None else found.batch["rollout_is_weights"]
        num_tokens = num_tokens if o["use_v1"] else int(mask.sum())
    mask = mask.bool()
    config = actor_config(o, {**correction, "loss_type": o["loss_type"]})
    config.global_batch_info.update(
        dp_size=1, batch_num_tokens=num_tokens, global_batch_size=len(mask), loss_scale_factor=None
    )
    loss, _ = get_policy_loss_fn(mode)(old, now, advantages, mask, o["loss_agg_mode"], config, weights)
    if o.get("use_kl_loss"):
        kl = kl_penalty(now, reference, o["kl_loss_type"])
        loss = loss + o["kl_loss_coef"] * agg_loss(kl, mask, o["loss_agg_mode"], **config.global_batch_info)
    loss.backward()
    assert now.grad is not None
    return loss.item(), now.grad.numpy() * cases.MASK


def actor_config(o: dict[str, Any], correction: dict[str, Any]) -> Any:
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    of_loss = ("loss_mode", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
    of_actor = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg", "loss_agg_mode")
    return FSDPActorConfig(
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(
            **{key: o[key] for key in of_loss if key in o}, rollout_correction=correction
        ),
        **{key: o[key] for key in of_actor},
    )


def compared(name: str, options: dict[str, Any], num_cases: int, expected_of: Expect) -> Row:
    """Compare over cases of random numbers; losses and ratio are those of the first."""
    is_first_update = is_at_first_update(options)
    translation = cases.imported(options)
    reason = "; ".join(finding.reason for finding in translation.decisive)
    pairs = []
    for seed in range(num_cases):
        columns = cases.case(seed, is_first_update=is_first_update)
        try:
            expected = expected_of(options, columns)
        except (NotImplementedError, ValueError, AssertionError, RuntimeError, KeyError, TypeError) as error:
            told = f"verl computes no such loss: {type(error).__name__}"
            return Row(name, None, None, None, None, "refused" if reason else "DIFFERS", reason or told)
        pairs.append((expected, cases.our_loss(Config.model_validate(translation.values), *columns)))
    (wanted, _), (ours, _) = pairs[0]
    far = max(np.abs(our[1] - its[1]).max() / (np.abs(its[1]).max() + TINY) for its, our in pairs)
    losses = max(abs(our[0] - its[0]) / (abs(its[0]) + TINY) for its, our in pairs)
    along = float((pairs[0][1][1] * pairs[0][0][1]).sum() / ((pairs[0][0][1] ** 2).sum() + TINY))
    is_equal = far <= TOLERANCE and (
        losses <= TOLERANCE or options.get("kl_loss_type") in ("kl+", "k1+", "abs+")
    )
    verdict = "refused" if reason else "equal" if is_equal else "DIFFERS"
    return Row(name, wanted, ours, along, float(far), verdict, reason)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--verl", type=Path, help="site-packages with verl 0.9.1; default: the test's formulas"
    )
    parser.add_argument("--tables", help="comma-separated; default: all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    version, expected_of = "none: the formulas of the test", of_formulas
    if args.verl is not None:
        sys.path.append(str(args.verl))
        import verl

        version, expected_of = verl.__version__, verls
    port = reserved_port()
    join_ranks(LearnerConfig(), rank=0, address="127.0.0.1", port=port)
    tables: dict[str, list[Row]] = {}
    for place, (table, name, options) in enumerate(settings()):
        if args.tables and table not in args.tables.split(","):
            continue
        row = compared(name, options, 1 if "with" in table else NUM_CASES, expected_of)
        tables.setdefault(table, []).append(row)
        if row.verdict == "DIFFERS" or place % 200 == 0:
            print(place, row, flush=True)
    leave_ranks()
    found = result(version, tables)
    print(found["counts"])
    write_result(args.out, found)


def is_at_first_update(options: dict[str, Any]) -> bool:
    """Return whether verl decides anew at each update, so that only a step with one update can be equal."""
    decides = "_cov" in options.get("loss_mode", "") or {"rollout_rs", "bypass_mode"} <= options.keys()
    return decides and options.get("ppo_mini_batch_size") != 4


def result(version: str, tables: dict[str, list[Row]]) -> dict[str, Any]:
    """Return the counts of all tables, and the rows of those that are no product of two others."""
    compact = {
        name: [{k: v for k, v in asdict(row).items() if v not in (None, "")} for row in rows]
        for name, rows in tables.items()
        if "with" not in name
    }
    return {
        "what": "loss and gradient of what `config import` makes of verl's settings, against verl's own",
        "verl": version,
        "counts": {name: dict(Counter(row.verdict for row in rows)) for name, rows in tables.items()},
        "largest_difference_of_equal": max(
            row.difference or 0.0 for rows in tables.values() for row in rows if row.verdict == "equal"
        ),
        "reasons": {
            name: dict(Counter(row.reason for row in rows if row.verdict == "refused"))
            for name, rows in tables.items()
        },
        "rows": compact,
    }


if __name__ == "__main__":
    main()
