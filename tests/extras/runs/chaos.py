"""Kills or stops the processes of a training run at random moments, and tells what became of the run.

    python tests/extras/runs/chaos.py --seed 3 --kills 20 --config configs/quickstart.yaml --run-dir runs/chaos/3
    trainer.save_freq=10

An event strikes a random process of a random kind: `kill -9`, or a stop for longer than servers may hang.
When it is the driver, the same command is started again, as a person would. Events are spread over the steps
of the run, each at a random moment behind a random step; several of one step strike during the recovery from
each other. Kinds take turns, in an order that is drawn anew for each round. All of it follows from the seed,
which is printed.

`--each 2` kills every kind of process that a run has twice instead (`ALL`), Ray's own too, in a random order;
`tests/extras/runs/kill_rewards.py` adds the processes of rewards:

    python tests/extras/runs/chaos.py --each 2 --steps 80 --run-dir runs/kills --out docs/results/kills.json
    rollout.num_servers=2 learner.world_size=2 trainer.save_freq=5 agent.plugins=[tests/extras/runs/kill_rewards.py]
    reward.terms.kill_process.weight=0 reward.terms.kill_batch.weight=0

`--each 2 --kinds "learner,sandbox,hub process"` with `tests/extras/runs/kill_worlds.py` strikes what worlds and a
critic add to a run.

Prints one line of JSON (`Report`); the exit status is 0 when the run made all its steps by itself, its audit
balances, no group was trained twice in the lineage that the weights came from, and no token was older than
the bound.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from agentrl.config.compose import load_config
from agentrl.data.trajectories import decode, read_parquet

MARK = "AGENTRL_CHAOS_MARK"
"""Environment variable by which the processes that the run started are found, wherever they went."""
WORDS = {
    "rollout": ("ray::RolloutActor",),
    "buffer": ("ray::BufferActor",),
    "learner": ("ray::WorkerHost", "ray::Learner"),
    "server": ("agentrl.extras.embedded",),
}
"""What the command line of a kind of process has in it; the driver is known by its id."""
KINDS = ("driver", *WORDS)
FURTHER_WORDS = {
    "recorder": ("ray::Recorder",),
    "batch scorer": ("ray::BatchScorer",),
    "supervisor of a server": ("ray::ServerActor",),
    "reward process": ("agentrl.rewards.worker",),
    "gcs_server": ("gcs/gcs_server",),
    "raylet": ("raylet/raylet",),
    "dashboard agent": ("ray::DashboardAgent",),
    "runtime environment agent": ("ray::RuntimeEnvAgent",),
    "log monitor": ("log_monitor.py",),
    "autoscaler": ("autoscaler/_private/monitor.py",),
    "dashboard": ("dashboard/dashboard.py",),
}
"""Kinds that only `--each` kills: those of Ray's own end the run, which the same command resumes."""
ALL = (*KINDS, *FURTHER_WORDS)
WORLD_WORDS = {
    "hub process": ("inside/agentrl_server.py",),
    "server of a hub": ("http.server",),
    "sandbox": ("launcher.main",),
    "guard": ("agentrl.guard",),
}
"""Kinds that a run has with `tests/extras/runs/kill_worlds.py`; only `--kinds` names them."""
ENDS_S = 20.0
"""A run that ends because a process of Ray's own was killed has ended by then."""
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RECOUNT = Path(__file__).with_name("recount.py")
"""Counts what a run trained on from its files alone, without agentrl's audit; exit status 0: it balances."""
HANG_TIMEOUT_S = 10.0
STOP_S = 20.0
"""Longer than HANG_TIMEOUT_S."""
POLL_S = 0.1
STOP_SHARE = 0.25
"""Of the events; the others kill."""
LAST_MOMENT = 0.7
"""No event is planned behind this share of the steps: some of them wait until a process is there again, while
the run goes on.
"""
RECENT_STEPS = 9
APPEARS_S = 300.0
"""A process that was struck is there again by then; a driver that was started anew needs a while on a busy
machine.
"""
GONE_S = 60.0
"""What a killed driver leaves behind has to end by itself by then."""
EACH_GONE_S = 10.0
"""The same, of `--each`."""
STALL_S = 600.0
MANY = 1000


@dataclass(frozen=True)
class Event:
    """What struck whom, when the run had made `step` steps and `seconds` after the beginning.

    line: of a process of Ray's own: the last line of the run, if it ended.
    """

    kind: str
    signal: str
    step: int
    seconds: float
    line: str = ""


@dataclass
class Report:
    """What became of the run. left_behind: processes that a killed driver left, and that did not end by
    themselves.
    """

    seed: int
    wall_s: float = 0.0
    events: list[Event] = field(default_factory=list)
    num_starts: int = 0
    unexpected_ends: list[str] = field(default_factory=list)
    left_behind: list[str] = field(default_factory=list)
    steps: int = 0
    num_trained_twice: int = 0
    lag_max: float = 0.0
    max_staleness: int = 0
    audit: int | None = None
    audit_says: str = ""
    recount: int | None = None
    recount_says: str = ""
    accuracy: float | None = None
    problems: list[str] = field(default_factory=list)


class Chaos:
    """One run under one series of events."""

    def __init__(
        self,
        config: str,
        run_dir: Path,
        overrides: Sequence[str],
        *,
        seed: int,
        kills: int,
        steps: int,
        kinds: Sequence[str] = KINDS,
        stop_share: float = STOP_SHARE,
        gone_s: float = GONE_S,
        waits_for_step: bool = False,
        stall_s: float = STALL_S,
    ) -> None:
        self._random = random.Random(seed)
        self._steps, self._run_dir, self._stall_s = steps, run_dir, stall_s
        self._mark = uuid.uuid4().hex
        self._log = run_dir.with_suffix(".log")
        limits = [
            f"rollout.max_actor_restarts={MANY}",
            f"rollout.max_server_restarts={MANY}",
            f"learner.max_restarts={MANY}",
        ]
        own = [
            f"trainer.run_dir={run_dir}",
            f"trainer.steps={steps}",
            f"rollout.server_hang_timeout_s={HANG_TIMEOUT_S:g}",
            *limits,
        ]
        self._command = [sys.executable, "-m", "agentrl.cli", "train", config, *own, *overrides]
        self._moments = sorted(
            self._random.randrange(1, max(2, round(LAST_MOMENT * steps))) for _ in range(kills)
        )
        rounds = [self._random.sample(kinds, len(kinds)) for _ in range(0, kills, len(kinds))]
        self._victims = [kind for each in rounds for kind in each]
        self._stop_share, self._gone_s, self._waits_for_step = stop_share, gone_s, waits_for_step
        self._known: dict[int, psutil.Process] = {}
        self._stopped: list[tuple[float, psutil.Process]] = []
        self._started = time.monotonic()
        self.report = Report(seed)
        self._driver = self._start()

    def run(self) -> Report:
        """Strike until the run is over; return what became of it."""
        try:
            for step, kind in zip(self._moments, self._victims, strict=False):
                if (
                    not self._wait_until(lambda step=step: self.num_steps >= step)
                    or not self._pause()
                    or not self._strike(kind)
                ):
                    break
            self._wait_until(lambda: False)
        finally:
            self._wake(everyone=True)
            self._end()
        self._judge()
        return self.report

    # ------------------------------------------------------------------------------------------------ the run

    def _start(self) -> subprocess.Popen[bytes]:
        self.report.num_starts += 1
        self._run_dir.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log:
            self._log_begins = log.tell()
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self._mark},
            )

    @property
    def num_steps(self) -> int:
        """The last step that the run made."""
        return max((record["step"] for record in self.records()), default=0)

    def records(self) -> list[dict]:
        path = self._run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [
            record
            for line in lines
            if line.endswith("\n") and (record := json.loads(line))["kind"] == "train"
        ]

    def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait, and start the driver again whenever it ended too early; False when the run is complete, or
        stands still.
        """
        step, since = self.num_steps, time.monotonic()
        while not condition():
            if (status := self._driver.poll()) is not None:
                if status == 0 and self.num_steps >= self._steps:
                    return False
                self.report.unexpected_ends.append(
                    f"status {status} at step {self.num_steps}: {self._last_line()}"
                )
                if len(self.report.unexpected_ends) > 5:
                    self.report.problems.append("the run ended by itself again and again")
                    return False
                self._driver = self._start()
            if self.num_steps != step:
                step, since = self.num_steps, time.monotonic()
            if time.monotonic() - since > self._stall_s:
                self.report.problems.append(f"no step for {self._stall_s:g} s behind step {step}")
                return False
            self._wake()
            time.sleep(POLL_S)
        return True

    def _pause(self) -> bool:
        """Let a random part of some steps pass, so that events strike at any point of one."""
        if self._waits_for_step and not self._wait_until(self._has_stepped):
            return False
        # Of the last steps, not of the last one: a step that was struck takes as long as many others.
        times = [record.get("time/step_s", 1.0) for record in self.records()[-RECENT_STEPS:]] or [1.0]
        ends = time.monotonic() + self._random.uniform(0, 2) * min(statistics.median(times), 10.0)
        return self._wait_until(lambda: time.monotonic() > ends)

    def _has_stepped(self) -> bool:
        """Return whether the driver has made a step since it was started last."""
        with self._log.open("rb") as log:
            log.seek(self._log_begins)
            return b"\nstep " in log.read()

    def _last_line(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""

    # ------------------------------------------------------------------------------------------------- events

    def _strike(self, kind: str) -> bool:
        """Strike a process of the kind once there is one; False when the run is over before."""
        is_stop = self._random.random() < self._stop_share
        if (process := self._find(kind)) is None:
            return False
        number = signal.SIGSTOP if is_stop else signal.SIGKILL
        self.report.events.append(
            Event(kind, number.name, self.num_steps, round(time.monotonic() - self._started, 1))
        )
        print(f"chaos: {self.report.events[-1]}", file=sys.stderr, flush=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        if is_stop:
            self._stopped.append((time.monotonic() + STOP_S, process))
        elif kind == "driver" or (kind in FURTHER_WORDS and self._has_ended()):
            self._driver.wait()
            self.report.events[-1] = replace(self.report.events[-1], line=self._last_line())
            self._wait_for_the_rest()
            self._driver = self._start()
        return True

    def _has_ended(self) -> bool:
        """Return whether the driver ends soon."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(ENDS_S)
        return self._driver.poll() is not None

    def _find(self, kind: str) -> psutil.Process | None:
        """Return a random living process of the kind, after waiting for one; None when the run is over, or
        there never is one.
        """
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = (
                [self._as_process()]
                if kind == "driver"
                else [p for p in self._processes() if _is_of(p, (WORDS | FURTHER_WORDS | WORLD_WORDS)[kind])]
            )
            return bool(found)

        deadline = time.monotonic() + APPEARS_S
        if self._wait_until(lambda: is_there() or time.monotonic() > deadline) and not found:
            self.report.problems.append(f"there was no process of kind {kind} for {APPEARS_S:g} s")
        return self._random.choice(sorted(found, key=lambda process: process.pid)) if found else None

    def _as_process(self) -> psutil.Process:
        return psutil.Process(self._driver.pid)

    def _wake(self, *, everyone: bool = False) -> None:
        """Let stopped processes go on whose time is over; by then many of them were killed as hanging
        ones.
        """
        now = time.monotonic()
        for due, process in [entry for entry in self._stopped if everyone or entry[0] < now]:
            self._stopped.remove((due, process))
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def _processes(self) -> list[psutil.Process]:
        """Return the processes of the run. Some of Ray's have overwritten their environment with a title, so
        those below a known one count, also after its death.
        """
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.AccessDenied, psutil.NoSuchProcess):
                if process.environ().get(MARK) == self._mark:
                    self._known |= {one.pid: one for one in (process, *process.children(recursive=True))}
        self._known = {pid: process for pid, process in self._known.items() if _is_alive(process)}
        return list(self._known.values())

    def _wait_for_the_rest(self) -> None:
        """Wait until what a killed driver had started is gone; what stays is in the report."""
        self._wake(everyone=True)
        deadline = time.monotonic() + self._gone_s
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.report.left_behind += [" ".join(_command_line(process))[:80] for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _end(self) -> None:
        if self._driver.poll() is None:
            self._driver.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._driver.wait(GONE_S)
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    # ------------------------------------------------------------------------------------------------ verdict

    def _judge(self) -> None:
        report, records = self.report, self.records()
        report.wall_s = round(time.monotonic() - self._started, 1)
        report.steps = self.num_steps
        report.lag_max = max((record["rollout/lag/max"] for record in records), default=0.0)
        groups = Counter(
            group
            for file in (self._run_dir / "trajectories").glob("step_*.parquet")
            for group in _groups_of(file)
        )
        report.num_trained_twice = sum(count > 1 for count in groups.values())
        report.max_staleness = load_config(str(self._run_dir / "config.yaml"), []).buffer.max_staleness
        result = self._run_dir / "result.json"
        final = (
            json.loads(result.read_text()).get("validation", {}).get("final", {}) if result.exists() else {}
        )
        report.accuracy = final.get("val/accuracy")
        command = [sys.executable, "-m", "agentrl.cli", "audit", str(self._run_dir)]
        audit = subprocess.run(command, capture_output=True, text=True, timeout=300)
        report.audit, report.audit_says = audit.returncode, (audit.stdout + audit.stderr)[-2000:]
        if RECOUNT.exists():
            command = [sys.executable, str(RECOUNT), str(self._run_dir)]
            recount = subprocess.run(command, capture_output=True, text=True, timeout=300)
            report.recount = recount.returncode
            report.recount_says = (recount.stdout + recount.stderr)[-2000:]
        rules = {
            f"the run made {report.steps} of {self._steps} steps": report.steps == self._steps,
            "steps are missing or there twice": [record["step"] for record in records]
            == list(range(1, self._steps + 1)),
            "it ended by itself": not report.unexpected_ends,
            "a killed driver left processes behind": not report.left_behind,
            "groups were trained twice in one lineage": report.num_trained_twice == 0,
            "a token was older than the bound": report.lag_max <= report.max_staleness,
            "the audit does not balance": report.audit == 0,
            "the count from the files alone does not balance": report.recount in (0, None),
        }
        report.problems += [problem for problem, holds in rules.items() if not holds]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_of(process: psutil.Process, words: Sequence[str]) -> bool:
    line = " ".join(_command_line(process))
    return any(word in line for word in words)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _groups_of(file: Path) -> set[int]:
    return {trajectory.group_id for trajectory in decode(read_parquet(file))}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=int(time.time_ns() % 10_000))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=240, help="of the run: trainer.steps")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--kinds", help=f"default: {','.join(KINDS)}; of --each: ALL")
    parser.add_argument(
        "--stall",
        type=float,
        default=STALL_S,
        help="seconds without a step after which the run counts as stuck",
    )
    parser.add_argument(
        "--each",
        type=int,
        default=0,
        help="kill each of the kinds so many times, stop none, instead of --kills",
    )
    parser.add_argument("--out", type=Path, help="write what happened as JSON")
    parser.add_argument("overrides", nargs="*", help="of the config")
    args = parser.parse_args()
    kinds = args.kinds.split(",") if args.kinds else ALL if args.each else KINDS
    print(f"chaos: seed {args.seed}", file=sys.stderr, flush=True)
    chaos = Chaos(
        args.config,
        args.run_dir,
        [*args.overrides, f"trainer.steps={args.steps}"],
        seed=args.seed,
        kills=args.each * len(kinds) or args.kills,
        steps=args.steps,
        kinds=kinds,
        stop_share=0.0 if args.each else STOP_SHARE,
        gone_s=EACH_GONE_S if args.each else GONE_S,
        waits_for_step=bool(args.each),
        stall_s=args.stall,
    )
    report = chaos.run()
    if args.out:
        sys.path.append(str(BENCHMARKS))
        machine = importlib.import_module("machine")
        machine.write_result(args.out, {"arguments": sys.argv[1:], **asdict(report)})
    print(json.dumps(asdict(report)), flush=True)
    return int(bool(report.problems))


if __name__ == "__main__":
    sys.exit(main())
