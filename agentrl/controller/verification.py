"""Verification of what ranks wrote into a checkpoint, before it is read.

The ranks verify in parallel; the controller never opens their files. A call to the ranks covers a slice of
the bytes: each call has a deadline, and progress is reported between calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentrl.cluster.workers import Workers
from agentrl.config.trainer import Verify
from agentrl.controller.checkpoint import Checkpoint, damaged
from agentrl.data.checkpoint_files import Verification, read_manifest
from agentrl.learner.learner import Learner

SLICE_BYTES = 2 << 30
"""For each rank in one call: seconds if the disk is fast, minutes if it is slow."""
THREAD_SLICE_BYTES = 256 << 20
REPORT_S = 10.0


class VerificationProgress:
    """Reports a verification that takes longer than `REPORT_S`."""

    def __init__(
        self,
        name: str,
        total: int,
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._total, self._say, self._clock = name, total, say, clock
        self._begun = self._reported = clock()

    def reached(self, num_bytes: int) -> None:
        """Report that so many bytes are verified, unless the last report is recent."""
        now = self._clock()
        if now - self._reported < REPORT_S or num_bytes == 0:
            return
        self._reported = now
        left_s = (now - self._begun) * (self._total - num_bytes) / num_bytes
        reached, total = num_bytes / 1e9, self._total / 1e9
        self._say(f"verifying {self._name}: {reached:.1f} of {total:.1f} GB, {left_s:.0f} s left")


def verify_by_ranks(
    checkpoint: Checkpoint,
    learner: Workers[Learner],
    how: Verify,
    *,
    say: Callable[[str], None],
    parent: Path | None = None,
) -> None:
    """Let the learner's ranks verify the files that ranks wrote, those of the critic included.

    Args:
        parent: see `damaged`.

    Raises:
        CheckpointError: the checkpoint is damaged.
        LearnerError: a rank was lost.
    """
    whole = _reading(checkpoint, how)
    total = whole.num_bytes
    num_parts = -(-total // (SLICE_BYTES * learner.dp_size)) or 1
    progress = VerificationProgress(checkpoint.folder.name, total, say)
    for part in range(num_parts):
        damage = learner.run(Learner.find_damage, str(whole.folder), whole.below, whole.how, part, num_parts)
        if damage:
            raise damaged(checkpoint, _first(damage), parent=parent)
        progress.reached(total * (part + 1) // num_parts)


def verify_here(checkpoint: Checkpoint, how: Verify, *, num_threads: int, say: Callable[[str], None]) -> None:
    """Verify the files that ranks wrote in threads of this process.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    whole = _reading(checkpoint, how)
    total = whole.num_bytes
    num_parts = max(num_threads, -(-total // THREAD_SLICE_BYTES))
    progress = VerificationProgress(checkpoint.folder.name, total, say)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="verify") as executor:
        for part, damage in enumerate(
            executor.map(whole.damage, range(num_parts), [num_parts] * num_parts), start=1
        ):
            if damage:
                executor.shutdown(wait=False, cancel_futures=True)
                raise damaged(checkpoint, _first(damage))
            progress.reached(total * part // num_parts)


def _reading(checkpoint: Checkpoint, how: Verify) -> Verification:
    # Absolute, because ranks may have another working directory.
    folder = checkpoint.folder.absolute()
    return Verification(folder, read_manifest(folder), how, below=f"{checkpoint.learner.name}/")


def _first(damage: Sequence[str]) -> str:
    more = f", and {len(damage) - 1} more" if len(damage) > 1 else ""
    return damage[0] + more
