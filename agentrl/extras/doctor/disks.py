"""Check `disks`: rate, sync, locks and space of the folders that a run writes to."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from agentrl.buffer.file_systems import is_shared
from agentrl.errors import DiskError
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.disk_speed import DiskSpeed, measure_disk
from agentrl.extras.doctor.file_locks import LockReport, try_locks
from agentrl.extras.doctor.subject import Subject, existing

MIN_BYTES_PER_S = 50e6
"""Below, a checkpoint or a publish needs more than 20 s per GB."""
MAX_SYNC_S = 0.03
"""Of a small write; a spinning disk needs 0.01. Each event of the journal waits for one with
`buffer.journal_sync=machine`, each published version always."""
STATE_BYTES = 12
"""Per parameter in a checkpoint: weights and two moments of Adam, in float32."""
LITTLE_BYTES = 5_000_000_000
"""Free bytes that are little for a run whose model is not known."""
FEW_FILES = 100_000
RAY_STOPS_AT = 0.95
"""Ray refuses to spill objects to a disk that is fuller."""


def diagnose(subject: Subject) -> Iterator[Diagnosis]:
    """Write, sync and lock files in the folders of the run, and compare free space with a checkpoint."""
    run = existing(subject.run_folder)
    yield from examine_folder(run)
    yield judge_space("run folder space", run, _needed(subject))
    weights = existing(subject.weights_folder)
    if subject.is_given and subject.config.rollout.weights.kind.is_on_disk and not _is_same(run, weights):
        yield judge_speed("weights folder", weights, measure_disk(weights))
    temporary = Path(tempfile.gettempdir())
    yield judge_temporary(temporary)


def examine_folder(folder: Path) -> Iterator[Diagnosis]:
    """Measure a folder's disk and try its locks. What is written is removed."""
    if not os.access(folder, os.W_OK):
        cure = "another trainer.run_dir, or write permission"
        yield Diagnosis("run folder", "wrong", f"{folder} cannot be written", cure)
        return
    try:
        speed = measure_disk(folder)
    except DiskError as error:
        yield Diagnosis("run folder", "wrong", str(error), "free space, or choose another trainer.run_dir")
        return
    yield judge_speed("run folder", folder, speed)
    yield judge_locks(folder, try_locks(folder))


def judge_speed(part: str, folder: Path, speed: DiskSpeed) -> Diagnosis:
    """Judge the rate of a large write, and the duration of a small one that is synced."""
    text = f"{folder}: {speed.bytes_per_s / 1e6:,.0f} MB/s, a sync takes {1e3 * speed.sync_s:.1f} ms"
    figures = {"bytes_per_s": speed.bytes_per_s, "sync_s": speed.sync_s}
    if speed.bytes_per_s < MIN_BYTES_PER_S:
        cure = "a faster disk: checkpoints, attempts and published weights wait for it"
        return Diagnosis(part, "slow", text, cure, figures)
    if speed.sync_s > MAX_SYNC_S:
        cure = "another disk, or buffer.journal_sync=process: the journal waits for each sync"
        return Diagnosis(part, "slow", text, cure, figures)
    return Diagnosis(part, "ok", text, figures=figures)


def judge_locks(folder: Path, found: LockReport) -> Diagnosis:
    """Judge the file system: does it keep a second run out, and has SQLite its write-ahead log?"""
    cure = (
        "a file system with locks: mount it with them (Lustre: flock; NFS: local_lock=none), or use another"
    )
    if found.lock_problem is not None:
        return Diagnosis("locks", "wrong", f"{folder}: {found.lock_problem}", cure)
    if found.database_problem is not None:
        return Diagnosis("locks", "wrong", f"{folder}: {found.database_problem}", cure)
    if is_shared(folder):
        text = "locks work; shared by machines, so the journal writes without a write-ahead log"
        return Diagnosis("locks", "ok", f"{folder}: {text}")
    if not found.has_log:
        text = "locks work, but SQLite cannot keep a write-ahead log"
        return Diagnosis("locks", "slow", f"{folder}: {text}", "a local disk, if the journal is slow")
    return Diagnosis("locks", "ok", f"{folder}: locks and SQLite's write-ahead log work between processes")


def judge_space(part: str, folder: Path, needed: int | None) -> Diagnosis:
    """Compare free space and files with those of the run's checkpoints (in bytes; None: not known)."""
    free, state = shutil.disk_usage(folder).free, os.statvfs(folder)
    wanted = LITTLE_BYTES if needed is None else needed
    what = "" if needed is None else f"; checkpoints take {needed / 1e9:.1f} GB"
    text, figures = f"{folder}: {free / 1e9:.1f} GB free{what}", {"free_bytes": float(free)}
    if free < wanted:
        cure = "free space, another trainer.run_dir, or a smaller trainer.keep_last"
        return Diagnosis(part, "slow" if needed is None else "wrong", text, cure, figures)
    if state.f_files and state.f_favail < FEW_FILES:
        text = f"{text}; only {state.f_favail:,} more files"
        return Diagnosis(part, "slow", text, "remove files: this file system counts them", figures)
    return Diagnosis(part, "ok", text, figures=figures)


def judge_temporary(folder: Path) -> Diagnosis:
    """Judge the folder of temporary files, which has Ray's session."""
    usage = shutil.disk_usage(folder)
    share = usage.used / max(1, usage.used + usage.free)
    text = f"{folder}: {usage.free / 1e9:.1f} GB free, {share:.0%} used"
    if share > RAY_STOPS_AT:
        cure = f"free space: Ray complains above {RAY_STOPS_AT:.0%}; or TMPDIR, RAY_TMPDIR elsewhere"
        return Diagnosis("temporary files", "slow", text, cure)
    return Diagnosis("temporary files", "ok", text)


def _needed(subject: Subject) -> int | None:
    """Return the bytes of all checkpoints that a run keeps at once; None without checkpoints, or unknown."""
    trainer, parameters = subject.config.trainer, subject.num_parameters
    if parameters is None or not subject.is_given or trainer.save_freq < 1:
        return None
    # One more is written before the oldest is removed.
    return (trainer.keep_last + trainer.keep_best + 1) * STATE_BYTES * parameters


def _is_same(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev
