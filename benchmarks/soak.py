"""Soak test for memory growth and leaks: half an hour, 1,000 attempts in flight, all kinds of failures.

    python benchmarks/soak.py --minutes 30 --in-flight 1000 --out runs/bench/soak.json

Rollout actor, buffer actor, recorder and scorer of batches are real and run in Ray; the servers are paced
ones in their own processes (paced_server.py). Attempts have three turns and two tool calls. Some generations
fail with status 500, with half a body, or never end. Some tools and attempts time out. Every minute a server
is killed and another joins. A learner that only counts takes batches and publishes versions, each of which
interrupts sampling. All processes, Ray's own too, are sampled every ten seconds. The test passes
if

    memory     of each process grows by less than 2 % after the warm-up: by a linear fit through all
               samples, and from the first tenth to the last; by less than 1 MiB is as good
    left over  after the last attempt, the rollout process has the same tasks as a fresh one, and at most
               `--slack` more threads, sockets and open files
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import ray
import trio
from machine import write_result
from paced_server import Workload, set_version, start_server, url_of
from soak_samples import Sample, Verdict, draw, judge, look_at_buffer, look_at_rollouts, sample_of

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.training_buffer import BufferSettings
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cluster.actors import Actor
from agentrl.cluster.buffer import launch_buffer
from agentrl.cluster.cluster import ray_session
from agentrl.cluster.recorder import Recorder, launch_recorder
from agentrl.cluster.rollouts import ROLLOUT, rollout_worker
from agentrl.config.cluster import ClusterConfig
from agentrl.config.schema import Config
from agentrl.controller.batch_scorer import BatchScorer, Unscored, launch_scorer
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import FOLDER, AttemptFiles
from agentrl.rollout.worker import RolloutSettings, RolloutWorker
from agentrl.servers.client import SGLangClient

GROUP_SIZE = 8
MAX_STALENESS = 4
NUM_SERVERS = 2
ADMITTED = 2.5
"""Attempts admitted by the staleness bound, per attempt in flight: many wait for their group or the
learner."""
TAKE_S = 5.0
CALL_S = 120.0
CALLS_AT_ONCE = 50
NUM_TASKS = 4096
NUM_STEPS = 1_000_000
KEPT_FILES = 4
"""Files of trajectories that are kept, of the latest batches."""
CHECKPOINT_EVERY = 2
"""Batches between two calls of `settle`, as after checkpoints: earlier batches cannot be rolled back then.
The buffer's memory grows from one to the next, so there must be several of them in the time that is judged.
"""


@dataclass
class Totals:
    """Totals since the start."""

    batches: int = 0
    trajectories: dict[str, int] = field(default_factory=dict)
    kills: int = 0

    @property
    def num_trajectories(self) -> int:
        return sum(self.trajectories.values())


class Servers:
    """Paced servers, which can be killed and replaced one by one; all sample with `version`."""

    def __init__(self, workload: Workload, model: Path) -> None:
        self._workload, self._model = workload, model
        self._num_started = 0
        self.version = 1
        self._processes = [self._start() for _ in range(NUM_SERVERS)]
        self.urls = [self._join(process) for process in self._processes]

    def _start(self) -> subprocess.Popen[str]:
        self._num_started += 1
        return start_server(replace(self._workload, seed=self._num_started), self._model)

    def _join(self, process: subprocess.Popen[str]) -> str:
        url = url_of(process)
        set_version(url, self.version)
        return url

    def replace_one(self, index: int) -> None:
        """Kill a server with its requests in flight, and start another on another port."""
        self._processes[index].kill()
        self._processes[index].wait()
        self._processes[index] = self._start()
        self.urls[index] = self._join(self._processes[index])

    def publish(self, version: int) -> None:
        """Interrupt sampling, and resume with `version`."""
        self.version = version

        async def update(url: str) -> None:
            client = SGLangClient(url)
            await client.pause("abort")
            await client.update_weight_version(version)
            await client.resume()
            await client.aclose()

        async def update_all() -> None:
            with trio.fail_after(CALL_S):
                async with trio.open_nursery() as nursery:
                    for url in self.urls:
                        nursery.start_soon(update, url)

        trio.run(update_all)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Learner:
    """Takes batches, publishes versions and sometimes replaces a server, in its own thread."""

    def __init__(
        self,
        buffer: Actor[ReplayBuffer],
        rollouts: Actor[RolloutWorker],
        scorer: Actor[BatchScorer],
        recorder: Actor[Recorder],
        servers: Servers,
        config: Config,
        *,
        seed: int,
        kill_every_s: float,
    ) -> None:
        self._buffer, self._rollouts, self._servers = buffer, rollouts, servers
        self._scorer, self._recorder = scorer, recorder
        self._folder = Path(config.trainer.run_dir or ".") / "trajectories"
        self._groups = config.buffer.groups_per_step
        self._random = random.Random(seed)
        self._kill_every_s = kill_every_s
        self._is_ending = threading.Event()
        self.totals = Totals()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._is_ending.set()
        self._thread.join(CALL_S)

    def _run(self) -> None:
        next_kill = time.monotonic() + self._kill_every_s
        try:
            while not self._is_ending.is_set():
                self._step()
                if time.monotonic() > next_kill:
                    self._servers.replace_one(self._random.randrange(NUM_SERVERS))
                    self.totals.kills += 1
                    self._tell()
                    next_kill += self._kill_every_s
        except BaseException as error:
            self.error = error
            raise

    def _step(self) -> None:
        step = self.totals.batches + 1
        data = self._buffer.run(ReplayBuffer.take, self._groups, TAKE_S, step)
        if data is None:
            return
        file = self._folder / f"step_{step:06d}.parquet"
        self._recorder.run(Recorder.record, str(file), self._scored(data), {"step": step})
        (self._folder / f"step_{step - KEPT_FILES:06d}.parquet").unlink(missing_ok=True)
        for outcome, count in Counter(t.outcome.value for t in data).items():
            self.totals.trajectories[outcome] = self.totals.trajectories.get(outcome, 0) + count
        self.totals.batches += 1
        self._servers.publish(self._servers.version + 1)
        self._tell()
        self._buffer.run(ReplayBuffer.advance, self._servers.version, step)
        if step % CHECKPOINT_EVERY == 0:
            self._buffer.run(ReplayBuffer.settle, step)

    def _scored(self, attempts: Sequence[AttemptFacts]) -> list[AttemptFacts]:
        scores = self._scorer.run(BatchScorer.score, attempts)
        if isinstance(scores, Unscored):
            raise RuntimeError(scores.text)
        return [score.on_facts(attempt) for attempt, score in zip(attempts, scores, strict=True)]

    def _tell(self) -> None:
        self._rollouts.run(
            RolloutWorker.set_servers, dict.fromkeys(self._servers.urls), self._servers.version
        )


def config_of(folder: Path, in_flight: int, workload: Workload) -> Config:
    """Return the config of a run whose staleness bound admits more attempts than can be in flight."""
    return Config(
        model={"path": str(folder)},
        data={"train_files": (str(folder / "train.jsonl"),)},
        agent={
            "default": "tool_agent",
            "plugins": tuple(str(Path(__file__).with_name(f"{name}.py")) for name in ("paced_tool", "turns")),
            "tools": ("wait",),
            "max_response_tokens": 100_000,
            "trajectory_timeout_s": 12 * workload.mean_turn_s,
            "tool_timeout_s": 4 * workload.tool_share * workload.mean_turn_s,
        },
        rollout={"group_size": GROUP_SIZE, "max_concurrent_trajectories": in_flight},
        buffer={
            "groups_per_step": max(1, round(ADMITTED * in_flight / GROUP_SIZE / (MAX_STALENESS + 1))),
            "max_staleness": MAX_STALENESS,
            "stragglers": "drop",  # else the learner would wait for attempts that never get an answer
        },
        reward={"terms": {"turns": {"weight": 0.0}}},
        trainer={"steps": NUM_STEPS, "run_dir": str(folder / "run")},
    )


def write_tasks(folder: Path) -> None:
    rows = (
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"What is {index}+{index}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * index)},
            "agent_name": "tool_agent",
        }
        for index in range(NUM_TASKS)
    )
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def open_buffer(config: Config, folder: Path, *, num_calls: int) -> Actor[ReplayBuffer]:
    """Start the buffer, with its journal in `folder`, and call it so many times."""
    folder.mkdir()
    settings = BufferSettings.of(config)
    buffer = launch_buffer(settings, str(folder), is_new=True, say=print, num_leasing=1)
    buffer.within(CALL_S).run(ReplayBuffer.resume, 0, None)
    for _ in range(0, num_calls, CALLS_AT_ONCE):
        ray.get([buffer.begin(ReplayBuffer.counts) for _ in range(CALLS_AT_ONCE)], timeout=CALL_S)
    return buffer


def open_rollouts(
    owner: str, config: Config, buffer: Actor[ReplayBuffer], servers: Servers
) -> Actor[RolloutWorker]:
    files = AttemptFiles(Path(config.trainer.run_dir or ".") / FOLDER, is_synced=False)
    rollouts = ROLLOUT.launch({}, rollout_worker, owner, RolloutSettings.of(config), buffer, files).within(
        CALL_S
    )
    rollouts.run(RolloutWorker.set_servers, dict.fromkeys(servers.urls), servers.version)
    rollouts.begin(RolloutWorker.run)
    return rollouts


@contextmanager
def prepared(args: argparse.Namespace) -> Iterator[tuple[Config, Servers]]:
    workload = Workload(
        args.seconds_per_token,
        slots=args.in_flight,
        mean_tokens=args.mean_tokens,
        fault_share=args.fault_share,
    )
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        write_tiny_tokenizer(folder)
        write_tasks(folder)
        servers = Servers(workload, folder)
        try:
            yield config_of(folder, args.in_flight, workload), servers
        finally:
            servers.close()


def soak(args: argparse.Namespace) -> tuple[list[Sample], Verdict, Totals]:
    """Play for `args.minutes`, then wait until everything has ended, and judge."""
    with prepared(args) as (config, servers), ray_session(ClusterConfig()):
        buffer = open_buffer(config, Path(config.trainer.run_dir or ""), num_calls=args.calls)
        rollouts = open_rollouts("soak", config, buffer, servers)
        scorer, recorder = (
            launch_scorer(config, buffer, None).within(CALL_S),
            launch_recorder().within(CALL_S),
        )
        parts = (buffer, rollouts, scorer, recorder, servers, config)
        learner = Learner(*parts, seed=args.seed, kill_every_s=args.kill_every)
        samples: list[Sample] = []
        started = time.monotonic()
        while (now := time.monotonic() - started) < 60 * args.minutes:
            time.sleep(max(0.0, args.every * len(samples) - now))
            samples.append(
                sample_of(
                    time.monotonic() - started, rollouts, buffer, attempts=learner.totals.num_trajectories
                )
            )
            show(samples[-1], learner.totals)
            if learner.error is not None:
                raise RuntimeError("the learner failed") from learner.error
        learner.end()
        buffer.run(ReplayBuffer.close)
        tries = 1 + config.rollout.max_retries
        wait_until_quiet(rollouts, timeout_s=(1 + tries) * config.agent.trajectory_timeout_s)
        fresh = open_rollouts("fresh", config, buffer, servers)
        for actor in (rollouts, fresh):  # without servers, their idle connections are closed
            actor.run(RolloutWorker.set_servers, {}, servers.version)
        time.sleep(args.every + 15)  # trio's threads end after ten idle seconds
        left, wanted = look_at_rollouts(rollouts), look_at_rollouts(fresh)
        verdict = judge(
            samples, left, wanted, look_at_buffer(buffer), warm_up_s=60 * args.warm_up, slack=args.slack
        )
        return samples, verdict, learner.totals


def wait_until_quiet(rollouts: Actor[RolloutWorker], *, timeout_s: float) -> None:
    """Wait until every attempt has ended, at the latest by its own and its retries' deadlines."""
    deadline = time.monotonic() + timeout_s
    while (left := rollouts.run(RolloutWorker.stats)["in_flight"]) > 0:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{left:g} attempts did not end within {timeout_s:g} s")
        time.sleep(1)


def show(sample: Sample, totals: Totals) -> None:
    finished, rollout = sample.counts.get("finished", 0.0), sample.rollout
    print(
        f"{sample.seconds:6.0f} s  in flight {sample.in_flight:5.0f}  finished {finished:6.0f}  trained on "
        f"{totals.num_trajectories:6d}  servers replaced {totals.kills}  rollout {rollout.memory_mib:.1f} "
        f"MiB {rollout.tasks} tasks {rollout.threads} threads {rollout.sockets} sockets  buffer "
        f"{sample.buffer.memory_mib:.1f} MiB, {sample.ready:.0f} groups ready",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--calls",
        type=int,
        default=30_000,
        help="of the buffer before the start: within the first 20,000 calls, Ray's own part of an actor's "
        "process grows by 7 MiB, whatever the actor does",
    )
    parser.add_argument(
        "--warm-up", type=float, default=10.0, help="minutes at the start that are not judged"
    )
    parser.add_argument("--in-flight", type=int, default=1000)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two samples")
    parser.add_argument("--seconds-per-token", type=float, default=0.2)
    parser.add_argument("--mean-tokens", type=float, default=100.0, help="of a turn")
    parser.add_argument(
        "--fault-share",
        type=float,
        default=0.002,
        help="of generations: 500, half a body, or never an answer",
    )
    parser.add_argument(
        "--kill-every", type=float, default=60.0, help="seconds between two deaths of servers"
    )
    parser.add_argument(
        "--slack",
        type=int,
        default=8,
        help="threads, sockets and files more than a fresh process: Ray's own come and go",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write samples and verdict as JSON, and a picture beside it")
    args = parser.parse_args()
    samples, verdict, totals = soak(args)
    print("\n" + ", ".join(f"{name} {count:g}" for name, count in samples[-1].counts.items()))
    print("\n".join(verdict.lines))
    if args.out:
        settings = {name: str(value) for name, value in vars(args).items()}
        record = {
            "settings": settings,
            "verdict": asdict(verdict),
            "totals": asdict(totals),
            "samples": [asdict(s) for s in samples],
        }
        write_result(args.out, record)
        draw(samples, args.out.with_suffix(".png"), warm_up_s=60 * args.warm_up)
    return int(not verdict.has_passed)


if __name__ == "__main__":
    sys.exit(main())
