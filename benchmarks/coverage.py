"""Coverage of the 95 % confidence intervals of evaluations, measured on simulated evaluations.

    python benchmarks/coverage.py --out docs/results/coverage.json

An evaluation draws its own problems, whose difficulty (the probability of a correct attempt) has a Beta
distribution, plays n attempts at each and estimates pass@k; k = 1 is accuracy. The true value is the mean
over the distribution. The smaller its `concentration`, the more problems are always or never solved; None:
all are equally difficult. `rate` is the true pass@k. Required: a coverage of 93-97 % at rates of 0.3 to 0.7,
and at least 90 % at 0.1 and 0.9. The exit code is 0 if that holds.

Problems in families of FAMILY, each of one difficulty, are measured, too, with one attempt per problem. The
intervals take problems for independent, so they are too narrow there; nothing is required of these cells.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from machine import facts
from scipy import optimize, special

from agentrl.figures.intervals import share_interval
from agentrl.figures.statistics import pass_at

ROOT = Path(__file__).parent.parent
RATES = (0.1, 0.3, 0.4, 0.5, 0.6, 0.7, 0.9)
CONCENTRATIONS = (0.5, 2.0, 10.0, None)
DESIGNS = ((1, 1), (8, 1), (8, 8), (16, 8))  # attempts per problem, k
FAMILY = 5
CHUNK = 100
"""Evaluations in memory at once."""


@dataclass(frozen=True, slots=True)
class Cell:
    """coverage: share of evaluations whose interval contains `rate`. width: mean width of the intervals."""

    num_problems: int
    n: int
    k: int
    concentration: float | None
    rate: float
    coverage: float
    width: float
    family: int = 1

    @property
    def is_met(self) -> bool:
        if self.family > 1:
            return True
        return 0.93 <= self.coverage <= 0.97 if 0.3 <= self.rate <= 0.7 else self.coverage >= 0.9


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--problems", default="30,1319", help="numbers of problems, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "coverage.json")
    args = parser.parse_args()
    cells = []
    for cell in measure([int(number) for number in args.problems.split(",")], args.evaluations, args.seed):
        cells.append(cell)
        print(*asdict(cell).values(), "" if cell.is_met else "MISSED", sep="\t", flush=True)
    num_missed = sum(not cell.is_met for cell in cells)
    settings = {"evaluations": args.evaluations, "seed": args.seed, "missed": num_missed}
    head = json.dumps(
        {"what": "python benchmarks/coverage.py", **facts(), **settings}, indent=1
    ).removesuffix("\n}")
    rows = ",\n".join(f"  {json.dumps(asdict(cell))}" for cell in cells)  # one line each
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(f'{head},\n "cells": [\n{rows}\n ]\n}}\n')
    return int(num_missed > 0)


def measure(numbers: list[int], num_evaluations: int, seed: int) -> Iterator[Cell]:
    """Yield one cell per combination, each with its own random numbers."""
    combinations = [
        *itertools.product([1], numbers, DESIGNS, CONCENTRATIONS, RATES),
        *itertools.product([FAMILY], numbers, DESIGNS[:1], CONCENTRATIONS[:2], RATES),
    ]
    for index, (family, num_problems, (n, k), concentration, rate) in enumerate(combinations):
        rng = np.random.default_rng((seed, index))
        by_count = pass_at(np.full(n + 1, n), np.arange(n + 1))[:, k - 1]
        covered, width = 0, 0.0
        for done in range(0, num_evaluations, CHUNK):
            shape = (min(CHUNK, num_evaluations - done), -(-num_problems // family))
            of_families = difficulties(rng, rate, k, concentration, shape)
            num_right = rng.binomial(n, of_families.repeat(family, axis=1)[:, :num_problems])
            low, high = share_interval(by_count[num_right])
            covered += int(((low <= rate) & (rate <= high)).sum())
            width += float((high - low).sum())
        yield Cell(
            num_problems,
            n,
            k,
            concentration,
            rate,
            covered / num_evaluations,
            round(width / num_evaluations, 5),
            family,
        )


def difficulties(
    rng: np.random.Generator, rate: float, k: int, concentration: float | None, shape: tuple[int, int]
) -> np.ndarray:
    """Draw each problem's probability of a correct attempt, f64[shape]; the population's pass@k is `rate`."""
    if concentration is None:
        return np.full(shape, 1 - (1 - rate) ** (1 / k))

    def excess(mean: float) -> float:
        a, b = mean * concentration, (1 - mean) * concentration
        return 1 - float(np.exp(special.betaln(a, b + k) - special.betaln(a, b))) - rate

    mean = float(optimize.brentq(excess, 1e-9, 1 - 1e-9))
    return rng.beta(mean * concentration, (1 - mean) * concentration, shape)


if __name__ == "__main__":
    sys.exit(main())
