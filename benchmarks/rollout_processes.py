"""Many rollout processes against one replay buffer: cost of `add` and `take`, with all attempts in flight.

    python benchmarks/rollout_processes.py --processes 64 --groups 1024

Each process runs the complete RolloutWorker of a run (trio, tools, HTTP, rewards, files of attempts) with its
RemoteBuffer, against paced servers (paced_server.py). The buffer is the real one, with its journal on disk.
Only Ray is missing: processes are forked from one that has imported everything, and call the buffer over Unix
sockets, with as many threads as Ray's actor has. So a process costs little memory and starts at once. What
Ray would add to a call is not measured.

`add` and `take` are timed in the buffer's process: seconds of the clock, and of its thread on the CPU, which
other processes on the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import trio
from machine import write_result
from paced_server import Workload, paced_servers, set_version

from agentrl.buffer.audit import audit
from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.buffer.records import Records
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cluster.actors import MAX_ASYNC_CALLS, RetryPolicy
from agentrl.cluster.buffer import BUFFER, FileStore
from agentrl.cluster.remote_buffer import RemoteBuffer
from agentrl.config.schema import Config
from agentrl.data.attempt_files import FOLDER, AttemptFiles
from agentrl.rollout.garbage import collect_rarely
from agentrl.rollout.worker import RolloutSettings, RolloutWorker
from agentrl.servers.server_order import order_for
from agentrl.types import Message, Task

PRELOADED = [
    "agentrl.rollout.worker",
    "agentrl.cluster.buffer",
    "agentrl.cluster.remote_buffer",
    "agentrl.buffer.audit",
]
"""What each process would import for itself otherwise."""
POLL_S = 2.0
TAKE_S = 3600.0
RESULT = Path(__file__).parents[1] / "docs" / "results" / "rollout_processes.json"
MILLI = 1000.0


@dataclass(frozen=True)
class Figures:
    """Times are of one call unless noted. `*_cpu_*`: of the calling thread of the buffer's process.

    seconds_per_token, mean_tokens: of the servers (paced_server.py).
    add_calls, added: calls, and attempts in them. most_in_flight: attempts that were played at the same time.
    process_mb: memory of a rollout process, with its part of shared pages (mean), at the end.
    buffer_cpu_s: of the buffer's process for the whole run. lost: groups or attempts.
    """

    processes: int
    groups: int
    group_size: int
    seconds_per_token: float
    mean_tokens: float
    most_in_flight: int
    add_calls: int
    added: int
    add_median_ms: float
    add_p99_ms: float
    add_cpu_ms: float
    add_p99_cpu_ms: float
    take_s: float
    take_cpu_s: float
    process_mb: float
    buffer_mb: float
    buffer_cpu_s: float
    run_s: float
    lost: int


class Tasks:
    """The same task at every position."""

    def task(self, position: int) -> Task:
        return Task(
            f"t:{position}", "arithmetic", (Message("user", "6 * 7?"),), "tool_agent", ground_truth="42"
        )


# ------------------------------------------------------------------------------------------ the buffer's side


class BufferServer:
    """Answers calls of the buffer over a socket, `lease` aside with as many threads as its Ray actor has."""

    def __init__(self, buffer: ReplayBuffer, address: str) -> None:
        self._buffer = buffer
        self._seats = threading.Semaphore(BUFFER.num_threads)
        self._is_closed = False
        self._listener = Listener(address, "AF_UNIX", backlog=1024)
        self.adds: list[tuple[float, float, int]] = []  # seconds, CPU seconds, attempts
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._is_closed:
            with suppress(OSError):  # of the listener, when it is closed
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        while True:
            try:
                name, args, kwargs = connection.recv()
            except (EOFError, OSError):  # the process has ended
                return
            try:
                answer = self._call(name, args, kwargs)
            except Exception as error:  # noqa: BLE001 - boundary of one call: it is raised at the caller
                answer = error
            with suppress(OSError):
                connection.send(answer)

    def close(self) -> None:
        """Take no more connections."""
        self._is_closed = True
        self._listener.close()

    def _call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        method = getattr(self._buffer, name)
        if name in BUFFER.long_polls:
            return method(*args, **kwargs)
        with self._seats:
            started, cpu = time.perf_counter(), time.thread_time()
            answer = method(*args, **kwargs)
            if name == "add":
                spent = time.perf_counter() - started, time.thread_time() - cpu
                self.adds.append((*spent, len(args[1])))
        return answer


# ------------------------------------------------------------------------------------------ a rollout process


class SocketBuffer:
    """Calls the buffer's process: `agentrl.cluster.remote_buffer.BufferCalls`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._free: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._limiter = trio.CapacityLimiter(MAX_ASYNC_CALLS)

    def within(self, timeout_s: float, /) -> SocketBuffer:
        return self

    async def run_async(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._call, method.__name__, args, kwargs)
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)

    def _call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            connection = self._free.get_nowait()
        except queue.Empty:
            connection = Client(self._address, "AF_UNIX")
        connection.send((name, args, kwargs))
        answer = connection.recv()
        self._free.put(connection)
        if isinstance(answer, Exception):
            raise answer
        return answer


def play(index: int, settings: RolloutSettings, address: str, folder: Path, orders: Connection) -> None:
    """Be a rollout process until told to stop."""
    owner = f"rollout-{index}"
    store = FileStore(AttemptFiles(folder, is_synced=False), RetryPolicy())
    worker = RolloutWorker(settings, RemoteBuffer(owner, SocketBuffer(address), store))
    collect_rarely()
    while (order := orders.recv()) is not None:
        match order:
            case "run":
                threading.Thread(target=worker.run, daemon=True).start()
                orders.send(None)
            case "stats":
                orders.send(worker.stats())
            case (keys, version):
                worker.set_servers(keys, version)
                orders.send(None)
    worker.stop()


class Processes:
    """All rollout processes."""

    def __init__(self, num: int, settings: RolloutSettings, address: str, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._members = []
        for index in range(num):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=play, args=(index, settings, address, folder, theirs), daemon=True
            )
            process.start()
            self._members.append((process, ours))

    def ask(self, order: object) -> list[Any]:
        """Send an order to all and return their answers."""
        return self.ask_each([order] * len(self._members))

    def ask_each(self, orders: Sequence[object]) -> list[Any]:
        for (_, pipe), order in zip(self._members, orders, strict=True):
            pipe.send(order)
        return [pipe.recv() for _, pipe in self._members]

    def set_servers(self, urls: Sequence[str], version: int) -> None:
        num = len(self._members)
        keys = dict.fromkeys(urls)
        self.ask_each([(dict.fromkeys(order_for(keys, i, num)), version) for i in range(num)])

    def mean_mb(self) -> float:
        sizes = [psutil.Process(process.pid).memory_full_info().pss for process, _ in self._members]
        return float(np.mean(sizes)) / 1e6

    def stop(self) -> None:
        for _, pipe in self._members:
            pipe.send(None)
        for process, _ in self._members:
            process.join(30.0)
            process.kill()


# ------------------------------------------------------------------------------------------------ the measure


def config_of(model: Path, args: argparse.Namespace) -> Config:
    in_flight = (args.staleness + 1) * args.groups * args.group_size
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "agent": {
                "plugins": [str(Path(__file__).with_name("paced_tool.py"))],
                "tools": ["wait"],
                "max_response_tokens": 100_000,
                "trajectory_timeout_s": TAKE_S,
                "tool_timeout_s": 600.0,
            },
            "rollout": {
                "group_size": args.group_size,
                "max_concurrent_trajectories": -(-in_flight // args.processes),
                "max_server_silence_s": TAKE_S,
            },
        }
    )


def measure(args: argparse.Namespace, folder: Path) -> Figures:
    write_tiny_tokenizer(folder)
    config = config_of(folder, args)
    rules = LedgerRules(
        args.groups, args.staleness, args.group_size, total_groups=(args.staleness + 1) * args.groups
    )
    AttemptFiles.create(folder / FOLDER, is_synced=False)
    workload = Workload(args.seconds_per_token, slots=1 << 20, mean_tokens=args.mean_tokens)
    with paced_servers(workload, folder, count=args.servers) as urls:
        for url in urls:
            set_version(url, 0)
        address = str(folder / "buffer.socket")
        processes = Processes(args.processes, RolloutSettings.of(config), address, folder / FOLDER)
        buffer = ReplayBuffer(Tasks(), rules, folder / FOLDER, journal=Journal(folder / FILE))
        server = BufferServer(buffer, address)
        try:
            return run(args, folder, buffer, server, processes, urls)
        finally:
            processes.stop()
            server.close()
            buffer.close()


def run(
    args: argparse.Namespace,
    folder: Path,
    buffer: ReplayBuffer,
    server: BufferServer,
    processes: Processes,
    urls: Sequence[str],
) -> Figures:
    """Play, and take all batches that the bound admits."""
    buffer.advance(0, 0)
    processes.set_servers(urls, 0)
    started = time.monotonic()
    processes.ask("run")
    most, takes = 0, []
    for step in range(1, args.staleness + 2):
        batch = None
        while batch is None:
            in_flight = int(sum(stats["in_flight"] for stats in processes.ask("stats")))
            most = max(most, in_flight)
            ready = buffer.counts().ready
            passed = time.monotonic() - started
            print(f"{passed:4.0f} s: {in_flight:,} attempts in flight, {ready:,} groups ready", flush=True)
            if ready < args.groups:
                time.sleep(POLL_S)
                continue
            began, cpu = time.perf_counter(), time.thread_time()
            batch = buffer.take(args.groups, TAKE_S, step)
            takes.append((time.perf_counter() - began, time.thread_time() - cpu))
        assert len({(attempt.group_id, attempt.member) for attempt in batch}) == args.groups * args.group_size
        for url in urls:
            set_version(url, step)
        processes.set_servers(urls, step)
        buffer.advance(step, step)
        buffer.settle(step)
        print(f"step {step}: {time.monotonic() - started:.0f} s, {most:,} attempts in flight", flush=True)
    counts = buffer.counts()
    with Records.open(folder / FILE) as records:
        found = audit(records.events(), max_staleness=args.staleness)
    assert found.is_balanced, found.problems
    wall, cpu, sizes = (np.array(column) for column in zip(*server.adds, strict=True))
    wanted = (args.staleness + 1) * args.groups
    lost = wanted - counts.consumed + sum(counts.dropped.values()) + sum(counts.discarded.values())
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Figures(
        processes=args.processes,
        groups=args.groups,
        group_size=args.group_size,
        seconds_per_token=args.seconds_per_token,
        mean_tokens=args.mean_tokens,
        most_in_flight=most,
        add_calls=len(wall),
        added=int(sizes.sum()),
        add_median_ms=MILLI * float(np.median(wall)),
        add_p99_ms=MILLI * float(np.quantile(wall, 0.99)),
        add_cpu_ms=MILLI * float(cpu.mean()),
        add_p99_cpu_ms=MILLI * float(np.quantile(cpu, 0.99)),
        take_s=float(max(own[0] for own in takes)),
        take_cpu_s=float(max(own[1] for own in takes)),
        process_mb=processes.mean_mb(),
        buffer_mb=usage.ru_maxrss / MILLI,
        buffer_cpu_s=usage.ru_utime + usage.ru_stime,
        run_s=time.monotonic() - started,
        lost=lost,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--groups", type=int, default=1024, help="of a batch")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--servers", type=int, default=4, help="processes that answer")
    parser.add_argument("--seconds-per-token", type=float, default=0.05)
    parser.add_argument("--mean-tokens", type=float, default=100.0, help="of a turn")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asdict(measure(args, Path(folder)))
    for name, value in figures.items():
        print(f"{name:<16} {value:,.4g}" if isinstance(value, float) else f"{name:<16} {value:,}")
    write_result(args.out, figures)


if __name__ == "__main__":
    main()
