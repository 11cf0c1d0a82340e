"""Samples of the soak test (soak.py) and their evaluation.

Memory is private memory (RssAnon): Ray maps its shared object store into every process, page by page.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import psutil
import ray
import trio

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.cluster.actors import Actor
from agentrl.rollout.worker import RolloutWorker

MAX_GROWTH = 0.02
MAX_GROWTH_MIB = 1.0
"""This much is as good: Ray's own processes have 8 to 60 MiB."""
LOOK_S = 60.0
COUNTED = (
    "in_flight",
    "finished",
    "outcome/",
    "retried",
    "dropped_groups",
    "server",
    "num_inter",
    "num_tool",
)


@dataclass(frozen=True)
class Process:
    """A sample of one process. tasks: of trio and of the plugins' asyncio loop; 0 in the buffer's process.

    heap_used_mib, heap_free_mib: of glibc's malloc. blocks: in use by Python's allocator.
    """

    memory_mib: float
    rss_mib: float
    threads: int
    files: int
    sockets: int
    objects: int
    heap_used_mib: float = 0.0
    heap_free_mib: float = 0.0
    blocks: int = 0
    tasks: int = 0
    names: dict[str, int] | None = None


@dataclass(frozen=True)
class Sample:
    """A sample of both processes, `seconds` after the start.

    attempts: trained on so far. counts: counters of the rollout actor.
    ready, stored_attempts: complete groups in the buffer, and all of its attempts.
    """

    seconds: float
    in_flight: float
    attempts: int
    counts: dict[str, float]
    rollout: Process
    buffer: Process
    ready: float = 0.0
    stored_attempts: float = 0.0
    others: dict[str, float] = field(default_factory=dict)
    """Memory in MiB of the other processes, by name and id."""


@dataclass(frozen=True)
class Verdict:
    """The result. growth: relative to the level after the warm-up. lines: the findings as text."""

    has_passed: bool
    growth: dict[str, dict[str, float]]
    left: dict[str, int]
    wanted: dict[str, int]
    lines: tuple[str, ...]


# --------------------------------------------------------------------------------------- inside of the actors


def look_inside(count_tasks: Callable[[], Counter[str]] | None = None) -> Process:
    """Return a sample of the current process."""
    kib = {
        line.split(":")[0]: line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.endswith(" kB")
    }
    tasks = Counter() if count_tasks is None else count_tasks()
    heap_used, heap_free = look_at_heap()
    links = [link_of(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return Process(
        memory_mib=int(kib["RssAnon"]) / 1024,
        rss_mib=int(kib["VmRSS"]) / 1024,
        threads=len(os.listdir("/proc/self/task")),
        files=len([link for link in links if link]),
        sockets=sum(link.startswith("socket:") for link in links),
        objects=len(gc.get_objects()),
        heap_used_mib=heap_used,
        heap_free_mib=heap_free,
        blocks=sys.getallocatedblocks(),
        tasks=tasks.total(),
        names=dict(tasks),
    )


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _names = (
        "arena",
        "ordblks",
        "smblks",
        "hblks",
        "hblkhd",
        "usmblks",
        "fsmblks",
        "uordblks",
        "fordblks",
        "keepcost",
    )
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def look_at_heap() -> tuple[float, float]:
    """Return the used and the free memory of glibc's heaps in MiB; 0 with another allocator."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0.0, 0.0
    ask.restype = _HeapInfo
    info = ask()
    return (info.uordblks + info.hblkhd) / 2**20, info.fordblks / 2**20


def link_of(path: str) -> str:
    """Return the target of a file descriptor's link; "" if it was closed meanwhile."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def tasks_of(part: Any) -> Counter[str]:
    """Count the tasks of a RolloutWorker by name: trio's, and those of the plugins' asyncio loop."""

    def walk() -> Counter[str]:
        names: Counter[str] = Counter()
        waiting = [trio.lowlevel.current_root_task()]
        while waiting:
            task = waiting.pop()
            names[task.name.rpartition(".")[2]] += 1
            waiting += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        return names

    names = trio.from_thread.run_sync(walk, trio_token=part._token)
    names["asyncio"] += len(asyncio.all_tasks(part._host._loop))
    return names


def look_at_rollouts(actor: Actor[Any]) -> Process:
    return ray.get(
        actor.handle.__ray_call__.remote(lambda shell: look_inside(lambda: tasks_of(shell._part))),
        timeout=LOOK_S,
    )


def look_at_buffer(actor: Actor[Any]) -> Process:
    return ray.get(actor.handle.__ray_call__.remote(lambda shell: look_inside()), timeout=LOOK_S)


def sample_of(
    seconds: float, rollouts: Actor[RolloutWorker], buffer: Actor[ReplayBuffer], *, attempts: int
) -> Sample:
    counts = {
        name: count
        for name, count in rollouts.within(LOOK_S).run(RolloutWorker.stats).items()
        if name.startswith(COUNTED)
    }
    held = buffer.within(LOOK_S).run(ReplayBuffer.stats)
    processes = look_at_rollouts(rollouts), look_at_buffer(buffer)
    return Sample(
        seconds,
        counts["in_flight"],
        attempts,
        counts,
        *processes,
        ready=held["ready"],
        stored_attempts=held["stored_attempts"],
        others=look_at_others(),
    )


def look_at_others() -> dict[str, float]:
    """Return the memory of this process and of all that it started, except what is looked at from inside and
    the paced servers, which come and go.
    """
    found = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess, OSError, StopIteration):
            line = " ".join(process.cmdline())
            if not any(word in line for word in ("RolloutActor", "BufferActor", "paced_server", "guard.py")):
                found[f"{_title_of(process, line)} ({process.pid})"] = _anonymous_mib(process.pid)
    return found


def _title_of(process: psutil.Process, line: str) -> str:
    if process.pid == os.getpid():
        return "driver"
    scripts = [Path(word).name for word in line.split() if word.endswith(".py")]
    return line.strip() if line.startswith("ray::") else (scripts or [process.name()])[0]


def _anonymous_mib(pid: int) -> float:
    """Return the memory that no other process shares; raises StopIteration of one that has just ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) / 1024


# ------------------------------------------------------------------------------------------------ the verdict


def growth_of(seconds: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """Return the relative growth of values: by a linear fit, and from the first tenth to the last."""
    slope, start = np.polyfit(np.asarray(seconds) - seconds[0], values, 1)
    tenth = max(1, len(values) // 10)
    first, last = float(np.mean(values[:tenth])), float(np.mean(values[-tenth:]))
    return {"line": float(slope * (seconds[-1] - seconds[0]) / start), "tenths": last / first - 1}


def judge(
    samples: Sequence[Sample],
    left: Process,
    wanted: Process,
    buffer: Process,
    *,
    warm_up_s: float,
    slack: int,
) -> Verdict:
    """Judge the memory growth after the warm-up, and leaks.

    left: the rollout process after the last attempt. wanted: a fresh one.
    """
    judged = [sample for sample in samples if sample.seconds >= warm_up_s]
    seconds = [sample.seconds for sample in judged]
    growth = {
        "rollout": growth_of(seconds, [sample.rollout.memory_mib for sample in judged]),
        "buffer": growth_of(seconds, [sample.buffer.memory_mib for sample in judged]),
    }
    last = {"rollout": judged[-1].rollout.memory_mib, "buffer": judged[-1].buffer.memory_mib}
    for name in judged[0].others:
        here = [sample for sample in judged if name in sample.others]
        if len(here) > len(judged) / 2:  # Ray starts a few workers in advance, and ends idle ones
            last[name] = here[-1].others[name]
            growth[name] = growth_of(
                [sample.seconds for sample in here], [sample.others[name] for sample in here]
            )
    lines, passed = [], []
    for name, shares in growth.items():
        most = max(MAX_GROWTH, MAX_GROWTH_MIB / last[name])
        passed.append(all(share < most for share in shares.values()))
        lines.append(
            f"memory of {name}, {last[name]:.1f} MiB: {shares['line']:+.2%} by a line, "
            f"{shares['tenths']:+.2%} by tenths (wanted: below {most:.1%})"
        )
    begun = judged[0].buffer
    pairs = {
        "tasks": (left.tasks, wanted.tasks),
        "threads": (left.threads, wanted.threads + slack),
        "sockets": (left.sockets, wanted.sockets + slack),
        "files": (left.files, wanted.files + slack),
        "buffer_threads": (buffer.threads, begun.threads + slack),
        "buffer_sockets": (buffer.sockets, begun.sockets + slack),
        "buffer_files": (buffer.files, begun.files + slack),
    }
    for name, (got, most) in pairs.items():
        passed.append(got <= most)
        lines.append(f"{name} at the end: {got} (wanted: at most {most})")
    lines.append(f"objects at the end: {left.objects}, of a fresh process {wanted.objects}")
    more = Counter(left.names) - Counter(wanted.names)
    if more:
        lines.append(
            "tasks that a fresh process does not have: "
            + ", ".join(f"{name} {count}" for name, count in more.items())
        )
    lines.append("passed" if all(passed) else "FAILED")
    return Verdict(
        all(passed),
        growth,
        {name: got for name, (got, _) in pairs.items()},
        {name: most for name, (_, most) in pairs.items()},
        tuple(lines),
    )


def draw(samples: Sequence[Sample], path: Path, *, warm_up_s: float) -> None:
    """Plot all samples over time."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    minutes = [sample.seconds / 60 for sample in samples]
    panels: dict[str, Callable[[Process], float]] = {
        "memory, MiB": lambda process: process.memory_mib,
        "threads": lambda process: process.threads,
        "sockets": lambda process: process.sockets,
        "open files": lambda process: process.files,
        "objects of the collector": lambda process: process.objects,
        "tasks": lambda process: process.tasks,
    }
    figure, axes = pyplot.subplots(2, 3, figsize=(15, 7), sharex=True)
    for axis, (title, value) in zip(axes.flat, panels.items(), strict=True):
        axis.plot(minutes, [value(sample.rollout) for sample in samples], label="rollout process")
        axis.plot(minutes, [value(sample.buffer) for sample in samples], label="buffer process")
        axis.axvline(warm_up_s / 60, color="grey", linestyle=":")
        axis.set_title(title)
        axis.set_ylim(bottom=0)
    axes[0, 0].legend()
    for axis in axes[1]:
        axis.set_xlabel("minutes")
    figure.suptitle(
        f"{samples[-1].attempts:,} attempts trained on; {np.mean([s.in_flight for s in samples]):,.0f} in "
        "flight"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
