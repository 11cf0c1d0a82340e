"""`make mutants`: change one thing in a module, run the tests that cover it, and tell which changes no test
sees.

Options choose a sample; the same seed at the same commit is the same sample. A survivor is a missing test, or
a mutant that is no other program: such lines are listed in covered.py with the reason. A mutant that ends no
test in time counts as dead.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants.covered import EQUIVALENT, covered
from mutants.mutate import Mutant, mutants
from mutants.played import Played, Stage

ROOT = Path(__file__).resolve().parents[2]
WHOLE_S = 900.0
"""Deadline of a module's tests without a mutant."""
LEAST_S, TIMES = 60.0, 4.0
"""Deadline of a mutant: as many times as long as its tests take without it, and no less than so many
seconds.
"""


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    played: Played


def main() -> int:
    """Return 1 where mutants survived, 2 where some were not played."""
    options = _options()
    tests = covered(ROOT)
    sources = {path: (ROOT / path).read_bytes() for path in tests if options.only in path}
    every = [
        mutant
        for path, source in sources.items()
        for mutant in mutants(path, source)
        if not is_equivalent(mutant, source)
    ]
    chosen = random.Random(options.seed).sample(every, min(options.sample, len(every)))
    print(f"{len(chosen)} of {len(every)} mutants in {len(sources)} modules, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        outcomes = list(
            _played(Stage(ROOT, Path(folder), tests), chosen, sources, tests, minutes=options.minutes)
        )
    num_alive = sum(outcome.played.verdict == "survived" for outcome in outcomes)
    print(
        f"{len(outcomes) - num_alive} of {len(outcomes)} died ({1 - num_alive / max(len(outcomes), 1):.1%})"
    )
    if options.out:
        Path(options.out).write_text(
            json.dumps(_report(options, outcomes, sources, len(every)), indent=1) + "\n"
        )
    if len(outcomes) < len(chosen):
        print(
            f"{len(chosen) - len(outcomes)} were not played: the time was over, or their tests fail without "
            "them",
            file=sys.stderr,
        )
        return 2
    return 1 if num_alive else 0


def is_equivalent(mutant: Mutant, source: bytes) -> bool:
    """Return whether covered.py says that no test can see it."""
    return (mutant.path, mutant.of(source).decode().splitlines()[mutant.line - 1].strip()) in EQUIVALENT


def _played(
    stage: Stage,
    chosen: Iterable[Mutant],
    sources: Mapping[str, bytes],
    tests: Mapping[str, Sequence[str]],
    *,
    minutes: float,
) -> Iterator[Outcome]:
    """Play the mutants whose tests pass without them, in the order of the draw, until the time is over: any
    part of it is a sample.
    """

    @functools.cache
    def seconds_of(test: str) -> float:
        whole = stage.run([test], deadline_s=WHOLE_S)
        if whole.verdict != "survived":
            print(
                f"{test} ends without a mutant ({whole.verdict}):\n{whole.output[-2000:]}",
                file=sys.stderr,
                flush=True,
            )
        return whole.seconds if whole.verdict == "survived" else math.nan

    end = time.monotonic() + 60 * minutes
    for mutant in chosen:
        seconds = sum(map(seconds_of, tests[mutant.path]))
        if math.isnan(seconds):
            continue
        if time.monotonic() > end:
            return
        source = sources[mutant.path]
        played = stage.play(
            mutant.path, mutant.of(source), tests[mutant.path], deadline_s=max(LEAST_S, TIMES * seconds)
        )
        print(f"{mutant.path}:{mutant.line} {played.verdict} in {played.seconds:.1f} s", flush=True)
        if played.verdict == "survived":
            print(mutant.diff(source), flush=True)
        yield Outcome(mutant, played)


def _report(
    options: argparse.Namespace, outcomes: list[Outcome], sources: dict[str, bytes], num_mutants: int
) -> dict[str, object]:
    verdicts = [outcome.played.verdict for outcome in outcomes]
    return {
        "commit": subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip(),
        "cpu": next(
            (
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")
            ),
            "unknown",
        ),
        "seed": options.seed,
        "num_mutants": num_mutants,
        "sample": len(outcomes),
        **{
            verdict.replace(" ", "_"): verdicts.count(verdict)
            for verdict in ("killed", "survived", "timed out")
        },
        "share_dead": round(1 - verdicts.count("survived") / len(verdicts), 4),
        "seconds": round(sum(outcome.played.seconds for outcome in outcomes)),
        "survivors": [
            {
                "at": f"{o.mutant.path}:{o.mutant.line}",
                "diff": o.mutant.diff(sources[o.mutant.path]).splitlines(),
            }
            for o in outcomes
            if o.played.verdict == "survived"
        ],
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=60, help="how many mutants are played (60)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (0)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="begin no mutant after so long; what was played is a smaller sample",
    )
    parser.add_argument("--only", default="", help="modules whose path contains this (all)")
    parser.add_argument("--out", help="JSON file for the figures, like docs/results/mutants.json")
    return parser.parse_args()


if __name__ == "__main__":
    os.nice(10)
    sys.exit(main())
