"""Runs of the quickstart task that are stopped twice and go on, beside runs that nothing stops: their rewards
lie within the same spread.

    python benchmarks/resumed.py --seeds 0,1,2 --out docs/results/resumed.json

Runs are interrupted in four ways, each at one third and two thirds of the steps: Ctrl-C, SIGTERM and
`kill -9` of the driver, after which the same command is started again; and the loss of one of two Ray nodes,
which the run survives by itself. The node returns a little later. Runs on two nodes have two servers and
train on older tokens; they are compared with undisturbed runs on two nodes.

A curve is the mean training reward in windows of steps. The spread is the mean of the undisturbed seeds, plus
and minus two standard deviations of one more run from it (pooled over all windows and layouts). Some windows
of any run are outside, so each undisturbed run is compared with the others in the same way. The exit code is
1 if a run failed, its audit does not balance, or it has more windows outside than any undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
import numpy as np
from machine import cpu_name, write_whole
from quickstart_runs import AGENTRL, ROOT, TRAIN, RunFailed, add_arguments, prepare
from ray.cluster_utils import Cluster

SIGNALS = {"ctrl_c": signal.SIGINT, "sigterm": signal.SIGTERM, "kill_9": signal.SIGKILL}
NODE_LOST = "node_lost"
UNDISTURBED = "undisturbed"
TWO_NODES = "two_nodes"
"""Undisturbed runs on two nodes."""
STRIKES = (1 / 3, 2 / 3)
"""When a run is interrupted, as shares of its steps."""
POLL_S = 0.2
RUN_S = 3600.0
AUDIT_S = 300.0
KEY_NAME = "AGENTRL_BENCH_KEY"
"""Environment variable of the API key, which servers require when they listen on the network."""
NODE_OVERRIDES = (
    f"rollout.api_key_env={KEY_NAME}",
    "cluster.num_nodes=2",
    "rollout.num_servers=2",
    "placement.pools={learning: {node_resource: first}, serving: {nodes: 2}}",
    "placement.roles={actor: learning, servers: serving}",
)


@dataclass(frozen=True, eq=False)
class Curve:
    """A run. rewards: mean per training step. num_starts: of the command. audit: exit status and last
    line."""

    way: str
    seed: int
    steps: int
    commit: str
    rewards: list[float]
    accuracy: float
    num_starts: int
    num_rolled_back: int
    audit: int
    audit_says: str
    wall_s: float
    cpu: str = "not recorded"

    @property
    def name(self) -> str:
        return f"{self.way}, seed {self.seed}"


class TwoNodes:
    """A Ray cluster of two nodes on this machine; the second can be killed and started again."""

    def __init__(self) -> None:
        os.environ[KEY_NAME] = secrets.token_hex()  # inherited by all processes that the nodes start
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "resources": {"first": 1}, "include_dashboard": False},
        )
        self._add_second()

    def _add_second(self) -> None:
        self._second = self.cluster.add_node(num_cpus=1, resources={"second": 1}, node_ip_address="127.0.0.2")

    def lose_and_add(self, *, away_s: float = 20.0) -> None:
        self.cluster.remove_node(self._second, allow_graceful=False)
        time.sleep(away_s)
        self._add_second()


class Training:
    """`agentrl train` of the quickstart, whose progress is read from its metrics file."""

    def __init__(self, run_dir: Path, overrides: Sequence[str]) -> None:
        self._metrics, self._log = run_dir / "metrics.jsonl", run_dir.with_suffix(".log")
        self._command = [*TRAIN, "configs/quickstart.yaml", f"trainer.run_dir={run_dir}", *overrides]
        self._deadline = time.monotonic() + RUN_S
        self.num_starts = 0
        self.start()

    def start(self) -> None:
        self.num_starts += 1
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def records(self) -> list[dict]:
        lines = self._metrics.read_text().splitlines(keepends=True) if self._metrics.exists() else []
        return [
            record
            for line in lines
            if line.endswith("\n") and (record := json.loads(line))["kind"] == "train"
        ]

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has made `step`.

        Raises:
            RunFailed: the run ended before, or took too long.
        """
        while max((record["step"] for record in self.records()), default=0) < step:
            if self._process.poll() is not None or time.monotonic() > self._deadline:
                self._process.kill()
                raise RunFailed(f"the run did not make step {step}; see {self._log}")
            time.sleep(POLL_S)

    def stop_and_start(self, number: signal.Signals) -> None:
        """Send the signal, wait for the end, and start the same command again."""
        self._process.send_signal(number)
        self._process.wait(RUN_S)
        self.start()

    def finish(self) -> None:
        if (code := self._process.wait(max(1.0, self._deadline - time.monotonic()))) != 0:
            raise RunFailed(f"the run ended with exit code {code}; see {self._log}")


def measure(way: str, seed: int, args: argparse.Namespace) -> Curve:
    """Make one run, with its interruptions, and read its curve."""
    run_dir = args.runs / f"{way}_{seed}"
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    run_dir.with_suffix(".log").unlink(missing_ok=True)
    overrides = [
        f"trainer.seed={seed}",
        f"trainer.steps={args.steps}",
        "trainer.save_freq=10",
        "~tracking.baselines.untrained",
    ]
    started = time.monotonic()
    with two_nodes() if way in (NODE_LOST, TWO_NODES) else nullcontext() as nodes:
        if nodes is not None:
            overrides += [f"cluster.address={nodes.cluster.address}", *NODE_OVERRIDES]
        training = Training(run_dir, [*overrides, *args.overrides])
        for share in () if way in (UNDISTURBED, TWO_NODES) else STRIKES:
            training.wait_for_step(round(share * args.steps))
            nodes.lose_and_add() if nodes is not None else training.stop_and_start(SIGNALS[way])
        training.finish()
    return read_curve(
        way, seed, args, run_dir, num_starts=training.num_starts, wall_s=time.monotonic() - started
    )


@contextmanager
def two_nodes() -> Iterator[TwoNodes]:
    nodes = TwoNodes()
    try:
        yield nodes
    finally:
        nodes.cluster.shutdown()


def read_curve(
    way: str, seed: int, args: argparse.Namespace, run_dir: Path, *, num_starts: int, wall_s: float
) -> Curve:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((run_dir / "result.json").read_text())
    audit = subprocess.run(
        [*AGENTRL, "audit", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        timeout=AUDIT_S,
        check=False,
    )
    says = json.loads(audit.stdout)
    return Curve(
        way=way,
        seed=seed,
        steps=args.steps,
        commit=args.commit,
        rewards=[round(record["rollout/reward_mean"], 4) for record in records if record["kind"] == "train"],
        accuracy=result["validation"]["final"]["val/accuracy"],
        num_starts=num_starts,
        num_rolled_back=says["came_back"].get("rolled_back", 0),
        audit=audit.returncode,
        audit_says="balanced" if audit.returncode == 0 else audit.stdout[-500:],
        wall_s=round(wall_s, 1),
        cpu=cpu_name(),
    )


def windows_of(rewards: Sequence[float], size: int) -> np.ndarray:
    """Return the means of windows of `size` rewards, f64[num_windows], without an incomplete last window."""
    whole = len(rewards) // size
    return np.asarray(rewards[: whole * size]).reshape(whole, size).mean(axis=1)


@dataclass(frozen=True)
class Spread:
    """The expected range of the window means of one more undisturbed run, f64[num_windows] each."""

    low: np.ndarray
    high: np.ndarray

    def share_outside(self, windows: np.ndarray) -> float:
        return float(np.mean((windows < self.low) | (windows > self.high)))


def spreads_of(curves: Sequence[Curve], *, window: int) -> dict[str, Spread]:
    """Return the spread of the undisturbed runs of each layout that has some: UNDISTURBED, TWO_NODES."""
    ways = [way for way in (UNDISTURBED, TWO_NODES) if any(curve.way == way for curve in curves)]
    stacked = {
        way: np.stack([windows_of(curve.rewards, window) for curve in curves if curve.way == way])
        for way in ways
    }
    squares = sum(((rows - rows.mean(axis=0)) ** 2).sum() for rows in stacked.values())
    variance = squares / sum((len(rows) - 1) * rows.shape[1] for rows in stacked.values())
    deviations = {way: np.sqrt(variance * (1 + 1 / len(rows))) for way, rows in stacked.items()}
    return {
        way: Spread(rows.mean(axis=0) - 2 * deviations[way], rows.mean(axis=0) + 2 * deviations[way])
        for way, rows in stacked.items()
    }


def spread_for(curve: Curve, spreads: Mapping[str, Spread]) -> Spread:
    """Return the spread of the undisturbed runs with the same layout."""
    return spreads[TWO_NODES if curve.way in (NODE_LOST, TWO_NODES) else UNDISTURBED]


def judge(curves: Sequence[Curve], *, window: int) -> tuple[bool, list[str]]:
    """Compare the interrupted runs with the undisturbed ones; return whether all pass, and the report."""
    spreads = spreads_of(curves, window=window)
    outside = {curve: _share_outside(curve, curves, spreads, window=window) for curve in curves}
    most = max(share for curve, share in outside.items() if curve.way in spreads)
    rows = [
        "| run | windows outside | final accuracy | starts | rolled back | audit | s |",
        "|---|---|---|---|---|---|---|",
    ]
    is_well = True
    for curve in curves:
        is_well &= curve.audit == 0 and len(curve.rewards) == curve.steps and outside[curve] <= most
        says = (
            f"{outside[curve]:.0%}",
            f"{curve.accuracy:.3f}",
            curve.num_starts,
            curve.num_rolled_back,
            curve.audit_says,
            f"{curve.wall_s:.0f}",
        )
        rows.append(f"| {' | '.join(map(str, (curve.name, *says)))} |")
    return is_well, rows


def _share_outside(
    curve: Curve, curves: Sequence[Curve], spreads: Mapping[str, Spread], *, window: int
) -> float:
    """Return the share of a curve's windows that are outside the spread of the other undisturbed runs."""
    if curve.way in spreads:
        spreads = spreads_of([other for other in curves if other is not curve], window=window)
    return spread_for(curve, spreads).share_outside(windows_of(curve.rewards, window))


def draw(curves: Sequence[Curve], path: Path, *, window: int) -> None:
    """Plot the spread as an area and the interrupted runs as lines."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    spreads = spreads_of(curves, window=window)
    figure, axes = pyplot.subplots(1, len(spreads), figsize=(8 * len(spreads), 5), sharey=True, squeeze=False)
    for axis, (way, spread) in zip(axes.flat, spreads.items(), strict=True):
        steps = window * (np.arange(len(spread.low)) + 0.5)
        axis.fill_between(
            steps, spread.low, spread.high, color="lightgrey", label="spread of undisturbed runs"
        )
        for curve in (curve for curve in curves if spread_for(curve, spreads) is spread):
            style = {"color": "grey", "linewidth": 0.8} if curve.way == way else {"label": curve.name}
            axis.plot(steps, windows_of(curve.rewards, window), **style)
        for share in STRIKES:
            axis.axvline(share * curves[0].steps, color="black", linestyle=":")
        axis.set(
            xlabel="step",
            ylabel=f"mean reward of {window} steps",
            title="one node" if way == UNDISTURBED else "two nodes",
        )
        axis.legend()
    figure.suptitle("Stopped twice, and gone on")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def measure_all(args: argparse.Namespace, known: Sequence[Curve], keep: Callable[[Curve], None]) -> list[str]:
    """Make the runs that are not known, `args.at_once` at a time; return the failures."""
    ways = args.ways.split(",")
    layouts = [UNDISTURBED] * any(way in SIGNALS for way in ways) + [TWO_NODES] * (NODE_LOST in ways)
    plans = [(layout, int(seed)) for seed in args.seeds.split(",") for layout in layouts]
    plans += [(way, int(seed)) for seed in args.stopped_seeds.split(",") for way in ways]
    missing = [plan for plan in plans if plan not in {(curve.way, curve.seed) for curve in known}]
    failures = []
    # Each in its own process, because Ray's nodes can only be started from a main thread.
    with ProcessPoolExecutor(args.at_once, mp_context=multiprocessing.get_context("spawn")) as pool:
        runs = {plan: pool.submit(measure, *plan, args) for plan in missing}
        for (way, seed), run in runs.items():
            try:
                keep(run.result())
            except (RunFailed, subprocess.TimeoutExpired) as error:
                failures.append(f"{way} seed {seed}: {error}")
                print(failures[-1], flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ways", default=",".join([*SIGNALS, NODE_LOST]), help="to be stopped, separated by commas"
    )
    parser.add_argument("--seeds", default="0,1,2", help="of the undisturbed runs, on one node and on two")
    parser.add_argument("--stopped-seeds", default="0", help="of each way to be stopped")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--window", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=1, help="runs side by side")
    add_arguments(parser, "resumed")
    args = parser.parse_args()
    prepare()
    stored = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    curves = [
        curve
        for curve in (Curve(**run) for run in stored)
        if (curve.commit, curve.steps) == (args.commit, args.steps)
    ]

    def keep(curve: Curve) -> None:
        curves.append(curve)
        write_whole(args.out, {"what": __doc__.splitlines()[0], "runs": [asdict(each) for each in curves]})
        print(
            f"{curve.name}: accuracy {curve.accuracy:.3f}, audit {curve.audit_says}, {curve.wall_s:.0f} s",
            flush=True,
        )

    failures = measure_all(args, tuple(curves), keep)
    curves.sort(key=lambda curve: (curve.way not in (UNDISTURBED, TWO_NODES), curve.name))
    is_well, rows = judge(curves, window=args.window)
    print("\n" + "\n".join(rows))
    draw(curves, args.out.with_suffix(".png"), window=args.window)
    return int(bool(failures) or not is_well)


if __name__ == "__main__":
    sys.exit(main())
