"""Runs side by side, and two evaluations problem by problem."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import DataError
from agentrl.extras.research.compare import Comparison, compare
from agentrl.extras.view.run import RunReader, config_leaves, finite_or_none, thinned
from agentrl.extras.view.token_texts import read_config
from agentrl.figures.attempts import read_attempts
from agentrl.tracking.closing_table import TRAINED, VALIDATIONS, read_validations
from agentrl.tracking.metrics import StepRecord

OWN_KEYS = ("trainer.run_dir", "trainer.experiment_name", "trainer.seed", "seed", "data.seed", "rollout.seed")
"""Keys in which runs of one family may differ: where they are written, and the seed."""
THROUGHPUT = {
    "time/step_s": "seconds per step",
    "speed/sampled_tokens_per_s": "tokens sampled per second",
    "speed/action_tokens_per_s": "tokens trained on per second",
    "speed/trajectories_per_s": "attempts per second",
    "idle/learner": "learner idle",
    "idle/servers": "servers idle",
    "rollout/lag/mean": "lag",
}
CURVES = {
    "train": ("rollout/reward_mean", "rollout/accuracy", "rollout/response_tokens/mean", "learner/entropy",
              "learner/grad_norm", "rollout/lag/mean", "time/step_s", "attempts/failed_share"),
    "validation": ("val/reward_mean", "val/accuracy"),
}  # fmt: skip
MAX_PAIRS = 500


@dataclass(frozen=True, slots=True)
class ConfigDifference:
    """A key that differs: its value in each run as JSON text; None where the run's config has no such key."""

    key: str
    values: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class FamilyCurve:
    """A metric over the runs of one family: the mean at each step, and the least and the largest value.

    num_runs: runs with a value at the last step. low, high: equal to the mean for a single run.
    """

    family: int
    num_runs: int
    steps: list[float | None]
    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


@dataclass(frozen=True, slots=True)
class RunsBeside:
    """Runs side by side.

    families: of each run; runs whose configs differ only in OWN_KEYS share one. curves: metric -> families.
    throughput: name and the mean over steps of each run. final: name and the last validation of each run.
    """

    titles: tuple[str, ...]
    families: tuple[int, ...]
    differences: tuple[ConfigDifference, ...]
    curves: dict[str, tuple[FamilyCurve, ...]]
    throughput: tuple[tuple[str, tuple[float | None, ...]], ...]
    final: tuple[tuple[str, tuple[float | None, ...]], ...]


def compare_runs(runs: Sequence[RunReader]) -> RunsBeside:
    """Return runs side by side, in the given order.

    Raises:
        DataError: there are fewer than two.
    """
    if len(runs) < 2:
        raise DataError("give two or more runs to compare: agentrl view RUN RUN")
    configs = [config_leaves(read_config(run.source.folder)) for run in runs]
    families = _families(configs)
    records = [run.records() for run in runs]
    curves: dict[str, tuple[FamilyCurve, ...]] = {}
    for kind, names in CURVES.items():
        for name in names:
            found = _curves(name, [[r for r in own if r.kind == kind] for own in records], families)
            if found:
                curves[name] = found
    return RunsBeside(
        titles=tuple(run.source.title for run in runs),
        families=families,
        differences=_differences(configs),
        curves=curves,
        throughput=_throughput(records),
        final=_final([run.source.folder for run in runs], records),
    )


def compare_attempts(a: Path, b: Path) -> dict[str, Any]:
    """Return `agentrl compare` of two evaluations, on the problems that both have; at most MAX_PAIRS of each
    list of problems.

    Raises:
        DataError: they have no problem in common, or one is no evaluation.
    """
    found: Comparison = compare(read_attempts(a), read_attempts(b), only_common=True)
    told = found.to_json()
    for name in ("won", "lost"):
        told[f"num_{name}"] = len(told[name])
        told[name] = told[name][:MAX_PAIRS]
    return told


def _families(configs: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    known: dict[str, int] = {}
    found = []
    for number, config in enumerate(configs):
        own = {key: value for key, value in config.items() if key not in OWN_KEYS}
        # a run without a config is of no family but its own
        text = json.dumps(own, sort_keys=True, default=str) if own else f"run {number}"
        found.append(known.setdefault(text, len(known)))
    return tuple(found)


def _differences(configs: Sequence[Mapping[str, Any]]) -> tuple[ConfigDifference, ...]:
    keys = sorted({key for config in configs for key in config})
    found = []
    for key in keys:
        values = tuple(
            json.dumps(config[key], default=str, ensure_ascii=False)[:500] if key in config else None
            for config in configs
        )
        if len(set(values)) > 1:
            found.append(ConfigDifference(key, values))
    return tuple(sorted(found, key=lambda difference: difference.key in OWN_KEYS))


def _curves(
    name: str, records: Sequence[Sequence[StepRecord]], families: Sequence[int]
) -> tuple[FamilyCurve, ...]:
    found = []
    for family in sorted(set(families)):
        runs = [
            {r.step: r.values[name] for r in own if math.isfinite(r.values.get(name, math.nan))}
            for own, its in zip(records, families, strict=True)
            if its == family
        ]
        steps = sorted({step for run in runs for step in run})
        if not steps:
            continue
        values = np.array([[run.get(step, math.nan) for step in steps] for run in runs])
        found.append(
            FamilyCurve(
                family,
                int(np.isfinite(values[:, -1]).sum()),
                thinned(steps),
                thinned(np.nanmean(values, axis=0).tolist()),
                thinned(np.nanmin(values, axis=0).tolist()),
                thinned(np.nanmax(values, axis=0).tolist()),
            )
        )
    return tuple(found)


def _throughput(
    records: Sequence[Sequence[StepRecord]],
) -> tuple[tuple[str, tuple[float | None, ...]], ...]:
    rows = []
    for name, title in THROUGHPUT.items():
        values = tuple(
            _mean([r.values.get(name, math.nan) for r in own if r.kind == "train"]) for own in records
        )
        if any(value is not None for value in values):
            rows.append((title, values))
    return tuple(rows)


def _final(
    folders: Sequence[Path], records: Sequence[Sequence[StepRecord]]
) -> tuple[tuple[str, tuple[float | None, ...]], ...]:
    """Return the last validation of each run: that of its end, else the last one on the way."""
    finals = []
    for folder, own in zip(folders, records, strict=True):
        last = next((dict(r.values) for r in reversed(own) if r.kind == "validation"), {})
        finals.append(read_validations(folder / VALIDATIONS).get(TRAINED, last))
    names = sorted({name for final in finals for name in final if _is_shown(name)})
    return tuple((name, tuple(finite_or_none(final.get(name)) for final in finals)) for name in names)


def _is_shown(name: str) -> bool:
    return name in ("val/accuracy", "val/reward_mean", "val/response_tokens/mean", "val/failed") or (
        name.startswith(("val/accuracy/", "val/mean@", "val/pass@", "val/tool_use"))
        and "/low" not in name
        and "/high" not in name
    )


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return finite_or_none(statistics.fmean(known)) if known else None
