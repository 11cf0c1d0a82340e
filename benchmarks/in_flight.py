"""10,000 trajectories in flight on ONE rollout actor: memory, event loop gaps, garbage collection, open
files.

    python benchmarks/in_flight.py --out runs/bench/in_flight.json

The complete RolloutWorker plays (trio, asyncio tools, HTTP, rewards, Arrow), without Ray; paced servers
answer from their own processes (paced_server.py). Trajectories have three turns and two tool calls. They are
played with short and with long prompts: the slope between the two is the memory per token, and the intercept
is the memory besides tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import trio
from machine import write_result
from paced_server import Workload, paced_servers, set_version

from agentrl.chat.chat import Chat
from agentrl.chat.conversation import Conversation
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.schema import Config
from agentrl.data.trajectories import encode, to_ipc
from agentrl.rollout.garbage import collect_rarely
from agentrl.rollout.loop_gaps import gap_metrics
from agentrl.rollout.worker import RolloutSettings, RolloutWorker
from agentrl.types import Lease, Message, Task, Trajectory

GROUP_SIZE = 8
POLL_S = 0.5
KIB = 1024
GENERATING = 0.75
"""The ramp ends when this share of the trajectories is generating; the steady state is 3 / 3.6."""


@dataclass(frozen=True)
class Figures:
    """The figures of one run, in seconds unless noted. ramp: until all are in flight. steady: after that.

    bytes_each: growth of resident memory per trajectory in flight.
    tokens_each: tokens of a trajectory at that time.
    connections: maximum of open files. loop_share: CPU seconds of the loop's thread per second.
    collections: generation -> (number, longest, sum, garbage objects).
    objects_each: objects tracked by the garbage collector, per trajectory.
    """

    prompt_tokens: int
    in_flight: int
    bytes_each: float
    tokens_each: float
    ramp_s: float
    ramp_gap_p999_s: float
    ramp_gap_max_s: float
    steady_gap_p999_s: float
    steady_gap_max_s: float
    steps_per_s: float
    loop_share: float
    trajectories_per_s: float
    expected_per_s: float
    open_files: int
    collections: dict[int, tuple[int, float, float, int]]
    objects_each: float
    outcomes: dict[str, int]


class Endless:
    """A replay buffer that always has another group; it encodes finished trajectories as for the real one."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._num_leased = 0
        self.outcomes: dict[str, int] = {}
        self.thread_id = 0

    async def withdrawn(self) -> list[int]:
        return []

    async def lease(self, limit: int) -> Sequence[Lease]:
        self.thread_id = threading.get_native_id()
        await trio.lowlevel.checkpoint()
        numbers = range(self._num_leased, self._num_leased + limit)
        self._num_leased += limit
        return [Lease(number, self._task(number), GROUP_SIZE, 1) for number in numbers]

    def _task(self, number: int) -> Task:
        return Task(
            f"bench:{number}",
            "arithmetic",
            (Message("user", f"{number}: {self._prompt}"),),
            "tool_agent",
            ground_truth="42",
        )

    async def add(self, trajectories: Sequence[Trajectory]) -> None:
        def ship() -> None:
            to_ipc(encode(trajectories))

        await trio.to_thread.run_sync(ship)
        for trajectory in trajectories:
            self.outcomes[trajectory.outcome.value] = self.outcomes.get(trajectory.outcome.value, 0) + 1

    async def drop_group(self, group_id: int, reason: str) -> None:
        self.outcomes[f"dropped: {reason}"] = self.outcomes.get(f"dropped: {reason}", 0) + 1

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        self.outcomes[f"left out: {reason}"] = self.outcomes.get(f"left out: {reason}", 0) + 1


class Collections:
    """Number and duration of garbage collections by generation."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = {0: [], 1: [], 2: []}
        self.collected = {0: 0, 1: 0, 2: 0}
        self._started = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.thread_time()
        else:
            self.seconds[info["generation"]].append(time.thread_time() - self._started)
            self.collected[info["generation"]] += info["collected"]

    def summary(self) -> dict[int, tuple[int, float, float, int]]:
        return {
            g: (len(all_s), max(all_s, default=0.0), sum(all_s), self.collected[g])
            for g, all_s in self.seconds.items()
        }


def config_of(model: Path, in_flight: int, prompt_tokens: int) -> Config:
    return Config(
        model={"path": str(model)},
        data={"max_prompt_tokens": prompt_tokens + 500},
        agent={
            "plugins": (str(Path(__file__).with_name("paced_tool.py")),),
            "tools": ("wait",),
            "max_response_tokens": 100_000,
            "trajectory_timeout_s": 3600.0,
            "tool_timeout_s": 600.0,
        },
        rollout={"group_size": GROUP_SIZE, "max_concurrent_trajectories": in_flight},
    )


def measure(args: argparse.Namespace, prompt_tokens: int) -> Figures:
    """Play `args.in_flight` trajectories at once in this process."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_tiny_tokenizer(model)
        chat = Chat.load(folder)
        prompt = chat.decode((chat.encode(" again string name") * prompt_tokens)[:prompt_tokens])
        workload = Workload(args.seconds_per_token, slots=args.in_flight, mean_tokens=args.mean_tokens)
        with paced_servers(workload, model, count=args.servers) as urls:
            buffer = Endless(prompt)
            part = RolloutWorker(RolloutSettings.of(config_of(model, args.in_flight, prompt_tokens)), buffer)
            collect_rarely()
            for url in urls:
                set_version(url, 1)
            part.set_servers(dict.fromkeys(urls), 1)
            collections = Collections()
            try:
                return watch(part, buffer, collections, workload, args, prompt_tokens)
            finally:
                part.stop()


def watch(
    part: RolloutWorker,
    buffer: Endless,
    collections: Collections,
    workload: Workload,
    args: argparse.Namespace,
    prompt_tokens: int,
) -> Figures:
    process = psutil.Process()
    if args.tracemalloc:
        tracemalloc.start()
    rss_before, started, before = process.memory_info().rss, time.monotonic(), part.stats()
    player = threading.Thread(target=part.run, daemon=True)
    player.start()
    while (now := part.stats())["in_flight"] < args.in_flight or now[
        "generations_in_flight"
    ] < GENERATING * args.in_flight:
        time.sleep(POLL_S)
    ramp_s, all_up = time.monotonic() - started, part.stats()
    cpu_before = thread_cpu_s(process, buffer.thread_id)
    files, ended = 0, time.monotonic() + args.seconds
    while time.monotonic() < ended:
        time.sleep(POLL_S)
        files = max(files, len(os.listdir("/proc/self/fd")))
    seconds, after = time.monotonic() - started - ramp_s, part.stats()
    cpu = thread_cpu_s(process, buffer.thread_id) - cpu_before
    rss = process.memory_info().rss
    if args.tracemalloc:
        show_memory(args.in_flight)
    objects = gc.get_objects()
    held = sum(len(thing.token_ids) for thing in objects if type(thing) is Conversation)
    ramp, steady = grown(before, all_up), grown(all_up, after)
    ramp_gaps, steady_gaps = gap_metrics(ramp), gap_metrics(steady)
    turn_s = workload.mean_turn_s
    return Figures(
        prompt_tokens,
        args.in_flight,
        bytes_each=(rss - rss_before) / args.in_flight,
        tokens_each=held / args.in_flight,
        ramp_s=ramp_s,
        ramp_gap_p999_s=ramp_gaps["p999"],
        ramp_gap_max_s=ramp_gaps["max"],
        steady_gap_p999_s=steady_gaps["p999"],
        steady_gap_max_s=steady_gaps["max"],
        steps_per_s=sum(count for name, count in steady.items() if name.startswith("loop_gaps/")) / seconds,
        loop_share=cpu / seconds,
        trajectories_per_s=steady.get("finished", 0.0) / seconds,
        expected_per_s=args.in_flight
        / (turn_s * (workload.turns + workload.tool_share * (workload.turns - 1))),
        open_files=files,
        collections=collections.summary(),
        objects_each=len(objects) / args.in_flight,
        outcomes=buffer.outcomes,
    )


def thread_cpu_s(process: psutil.Process, thread_id: int) -> float:
    """Return the CPU time of one thread."""
    times = next(times for times in process.threads() if times.id == thread_id)
    return times.user_time + times.system_time


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def show_memory(in_flight: int) -> None:
    """Print the source lines that allocated most memory, per trajectory."""
    snapshot = tracemalloc.take_snapshot()
    for line in snapshot.statistics("lineno")[:45]:
        frame = line.traceback[0]
        place = "/".join(frame.filename.split("/")[-3:])
        print(
            f"{line.size / in_flight:9.0f} bytes {line.count / in_flight:7.1f} blocks  "
            f"{place}:{frame.lineno}",
            file=sys.stderr,
        )


def run_child(args: argparse.Namespace, prompt_tokens: int) -> dict[str, Any]:
    """Measure in a child process, so that runs do not share memory."""
    command = [sys.executable, __file__, *sys.argv[1:], "--child", str(prompt_tokens)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--servers", type=int, default=2, help="processes that answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured once all are in flight")
    parser.add_argument("--seconds-per-token", type=float, default=0.2)
    parser.add_argument("--mean-tokens", type=float, default=200.0, help="of a turn")
    parser.add_argument("--prompts", default="100,2100", help="lengths of the prompts in tokens, two of them")
    parser.add_argument("--tracemalloc", action="store_true", help="print which lines hold most memory; slow")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(asdict(measure(args, args.child))))
        return
    runs = [run_child(args, int(prompt)) for prompt in args.prompts.split(",")]
    for run in runs:
        print(json.dumps(run, indent=1))
    short, long = runs[0], runs[-1]
    per_token = (long["bytes_each"] - short["bytes_each"]) / max(
        1.0, long["tokens_each"] - short["tokens_each"]
    )
    beyond = short["bytes_each"] - per_token * short["tokens_each"]
    print(
        f"\na trajectory in flight: {beyond / KIB:.1f} KiB beyond its tokens (wanted: below 32), and "
        f"{per_token:.0f} bytes per token"
    )
    p999, longest = (1e3 * max(run[f"steady_gap_{name}_s"] for run in runs) for name in ("p999", "max"))
    print(f"CPU time between two checkpoints: p99.9 {p999:.1f} ms (wanted: below 50), max {longest:.0f} ms")
    write_result(args.out, {"runs": runs, "kib_beyond_tokens": beyond / KIB, "bytes_per_token": per_token})


if __name__ == "__main__":
    main()
