"""Settings of the allocator and of the garbage collector.

`FEW` and `release_free_memory` limit the memory growth of processes with many threads that run for days:
glibc has many heaps (arenas), each shared by a few threads. Memory freed in an arena is reused only by its
threads, and free memory between two live blocks is not returned to the system. So a process that allocates
blocks of ever changing sizes grows for hours, although it has no more live data. `FEW` limits the number of
arenas, and `release_free_memory` returns free pages. With other allocators, neither has an effect.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_GLIBC = ctypes.CDLL(None)
_GROWTH = 1.2
FEW = {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment variables: all threads share two arenas, and Arrow uses them too; its own pool keeps, for each
thread, what that thread has freed. Contention is low, because of Python's global lock.
"""


def release_free_memory() -> None:
    """Return the free pages of all arenas to the system; takes milliseconds per 100 MiB."""
    if hasattr(_GLIBC, "malloc_trim"):
        _GLIBC.malloc_trim(0)


class SteadyRelease:
    """Returns free memory to the system, at most once in `every_s` seconds. Thread-safe."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._released = time.monotonic()

    def consider(self) -> None:
        now = time.monotonic()
        if now - self._released >= self._every_s:
            self._released = now
            release_free_memory()


class GapLimit:
    """Limits what a repeated computation leaves behind when freed memory is kept for its next repetition.

    Blocks of changing sizes leave gaps between those that live on, and later ones do not fit there: the
    process that updates a model of 135 million parameters grew from 4.5 to 7 GiB within 24 steps.
    """

    def __init__(self) -> None:
        self._usual_pages: int | None = None

    def check(self) -> None:
        """Return free memory to the system if the process has grown by a fifth since its first repetition
        after the last return; to be called after each repetition.
        """
        if not hasattr(_GLIBC, "malloc_trim"):
            return
        held = int(Path("/proc/self/statm").read_text().split()[1])
        if self._usual_pages is None:
            self._usual_pages = held
        elif held > _GROWTH * self._usual_pages:
            release_free_memory()
            self._usual_pages = None


@contextmanager
def without_collections() -> Iterator[None]:
    """Suspend garbage collection within the block, which makes many objects and little garbage.

    Loading torch and transformers takes a fifth less time without the collections, and credit and plans of a
    large batch take a third less.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
