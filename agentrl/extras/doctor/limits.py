"""Check `limits`: open files, processes and address space of a process."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.subject import Subject
from agentrl.rollout.open_files import OTHER_FILES

FEW_PROCESSES = 4096
"""Ray counts threads, and has a hundred or more per worker process on a large machine."""
UNLIMITED = resource.RLIM_INFINITY


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Compare limits of this process, which the run's processes inherit, with what they need."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield judge_open_files(files, subject.config.rollout.max_concurrent_trajectories)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    yield judge_processes([*([] if soft == UNLIMITED else [soft]), *_cgroup_pids()])
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != UNLIMITED:
        yield Diagnosis(
            "address space",
            "wrong",
            f"limited to {space / 2**30:.1f} GiB; torch and Ray map more than they use",
            "`ulimit -v unlimited`",
        )


def judge_open_files(hard: int, num_trajectories: int) -> Diagnosis:
    """Judge the hard limit of open files: each attempt has a connection to its server and one for tools."""
    wanted, least = 2 * num_trajectories + OTHER_FILES, num_trajectories + OTHER_FILES
    shown = "unlimited" if hard == UNLIMITED else f"{hard:,}"
    text = f"{shown}; {num_trajectories} attempts at once need {least:,} to {wanted:,} per rollout actor"
    cure = f"`ulimit -Hn {wanted}`, or fewer rollout.max_concurrent_trajectories with more num_actors"
    if hard != UNLIMITED and hard < least:
        return Diagnosis("open files", "wrong", text, cure)
    if hard != UNLIMITED and hard < wanted:
        return Diagnosis("open files", "slow", text, cure)
    return Diagnosis("open files", "ok", text)


def judge_processes(limits: list[int]) -> Diagnosis:
    """Judge the limits of processes and threads; []: there are none."""
    if not limits:
        return Diagnosis("processes", "ok", "unlimited")
    text = f"at most {min(limits):,} processes and threads"
    if min(limits) < FEW_PROCESSES:
        cure = f"`ulimit -u {FEW_PROCESSES}` or more; docker run --pids-limit=-1"
        return Diagnosis("processes", "slow", f"{text}; Ray's start may fail", cure)
    return Diagnosis("processes", "ok", text)


def _cgroup_pids() -> list[int]:
    files = (Path("/sys/fs/cgroup/pids.max"), Path("/sys/fs/cgroup/pids/pids.max"))
    texts = [file.read_text().strip() for file in files if file.is_file()]
    return [int(text) for text in texts if text.isdigit()]
