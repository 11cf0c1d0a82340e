"""Comparison of off-policy corrections on stored steps: as a table, as JSON and as a picture.

The reference is the on-policy gradient. If the trained version itself sampled all tokens of some
trajectories, it is the gradient on these (`fresh`). Else it is the gradient on all trajectories, with the
proximal policy taken as their sampler (`proximal := policy`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.correction import CorrectionConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.controller.assess import assess, measure_on_ranks
from agentrl.controller.credit import credit, leave_out_masked, leave_out_old, whitened, with_reward
from agentrl.controller.learner import plan_for
from agentrl.controller.roles import Roles
from agentrl.data.atomic_files import write_atomically
from agentrl.extras.research.stored_steps import StoredStep, is_fresh
from agentrl.extras.watch.rules import finite
from agentrl.learner.counterfactual import Counterfactual
from agentrl.learner.learner import Learner

CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {"weight": "none"},
    "token_tis": {"weight": "token", "cap": 2.0},
    "sequence_tis": {"weight": "sequence", "cap": 2.0},
    "geometric_tis": {"weight": "geometric", "cap": 2.0},
    "icepop": {"weight": "token", "floor": 0.5, "cap": 5.0, "outside": "mask"},
    "geometric_band": {
        "weight": "token",
        "reject": {"band": {"statistic": "k1", "level": "sequence_mean", "lower": 0.99, "upper": 1.01}},
    },
    "token_band": {
        "weight": "none",
        "reject": {"band": {"statistic": "k1", "level": "token", "lower": 0.5, "upper": 2.0}},
    },
    "m2po": {"weight": "none", "m2po_threshold": 0.04},
}
"""Name in the report -> `algorithm.correction`.

OPSM is missing: before a step's first update it masks nothing.
"""

COLUMNS = tuple(field.name for field in fields(Counterfactual))


class CorrectionsReport:
    """Compares corrections at each step, writes a line per step and correction, and a summary at the end."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        rollout: RolloutConfig,
        learner: LearnerConfig,
        folder: Path,
        *,
        resumed_at: int,
    ) -> None:
        """algorithm: with all values resolved."""
        self._algorithm = algorithm
        self._rollout = rollout
        self._learner = learner
        self._folder = folder
        self._lines = folder / "corrections.jsonl"
        kept = [line for line in self._read() if line["step"] <= resumed_at] if resumed_at else []
        self.is_empty = not kept
        write_atomically(self._lines, "".join(json.dumps(line) + "\n" for line in kept))

    def observe(self, roles: Roles, batch: StoredStep) -> None:
        """Compare all corrections on one step. The learner's state does not change."""
        algorithm, rollout, learner = self._algorithm, self._rollout, roles.learner
        groups = with_reward(batch.groups)
        assessment = assess(roles, groups, algorithm, self._learner)
        credited = credit(groups, algorithm, group_size=rollout.fixed_group_size, assessment=assessment)
        credited = whitened(credited, partial(measure_on_ranks, learner))
        credited = leave_out_old(credited, lags=batch.lineage.lags, max_lag=algorithm.correction.max_lag)
        left = leave_out_masked(credited, rollout.masked_outcomes)
        samples = [sample for members in left for sample in members]
        if not samples:  # all are masked, so there is no gradient
            return
        fresh = [s for s in samples if is_fresh(s.attempt, batch.learned_by)]
        microbatches, reference = (
            plan_for(learner, chosen, self._learner) for chosen in (samples, fresh or samples)
        )
        others = variants(algorithm)
        found = learner.patient(len(others) + 1).run(Learner.compare, microbatches, reference, others)
        facts = {
            "step": batch.step,
            "reference": "fresh" if fresh else "proximal := policy",
            "fresh": len(fresh) / len(samples),
        }
        with self._lines.open("a", encoding="utf-8") as file:
            for name, one in found.items():
                file.write(json.dumps({**facts, "correction": name, **finite(asdict(one))}) + "\n")

    def finish(self, say: Callable[[str], None]) -> Path:
        """Write corrections.json, .md and .png, show the table, and return the Markdown file."""
        lines = list(self._read())
        summary = summarise(lines)
        write_atomically(
            self._folder / "corrections.json", json.dumps({"steps": lines, "mean": summary}, indent=1)
        )
        markdown = self._folder / "corrections.md"
        write_atomically(markdown, _markdown(summary, lines))
        from agentrl.extras.view.corrections_picture import draw  # matplotlib takes a second to load

        draw(lines, summary, self._folder / "corrections.png")
        say(_console(summary))
        return markdown

    def _read(self) -> Iterator[dict[str, Any]]:
        if self._lines.is_file():
            yield from map(json.loads, self._lines.read_text(encoding="utf-8").splitlines())


def variants(algorithm: AlgorithmConfig) -> dict[str, AlgorithmConfig]:
    """Return the algorithm with each of CORRECTIONS, and as configured, by name."""
    others = {name: CorrectionConfig.model_validate(values) for name, values in CORRECTIONS.items()}
    return {name: algorithm.model_copy(update={"correction": c}) for name, c in others.items()} | {
        "configured": algorithm
    }


def summarise(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return correction -> {column: mean over the steps where it is defined}; None if it never is.

    The columns include `cosine_std`, the population standard deviation over steps.
    """
    names = dict.fromkeys(str(line["correction"]) for line in lines)
    return {name: _mean([line for line in lines if line["correction"] == name]) for name in names}


def _mean(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    columns = {column: [line[column] for line in lines if line[column] is not None] for column in COLUMNS}
    means: dict[str, float | None] = {
        name: statistics.fmean(values) if values else None for name, values in columns.items()
    }
    return means | {"cosine_std": statistics.pstdev(columns["cosine"]) if columns["cosine"] else None}


def _cells(values: Mapping[str, float | None]) -> list[str]:
    return ["-" if (value := values[name]) is None else f"{value:.4g}" for name in COLUMNS]


def _markdown(summary: Mapping[str, Mapping[str, float | None]], lines: Sequence[Mapping[str, Any]]) -> str:
    references = ", ".join(sorted({str(line["reference"]) for line in lines}))
    steps = len({line["step"] for line in lines})
    head = ["correction", *COLUMNS]
    rows = [
        head,
        ["---"] + ["---:"] * len(COLUMNS),
        *([name, *_cells(values)] for name, values in summary.items()),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return (
        f"# Corrections on stored trajectories\n\nMeans over {steps} steps; reference gradient: "
        f"{references}.\n\n{table}\n"
    )


def _console(summary: Mapping[str, Mapping[str, float | None]]) -> str:
    table = Table("correction", *COLUMNS)
    for name, values in summary.items():
        table.add_row(name, *_cells(values))
    console = Console(width=110)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip()
