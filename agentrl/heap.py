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
from collections.abc import Iterator
from contextlib import contextmanager

_GLIBC = ctypes.CDLL(None)
FEW = {"MALLOC_ARENA_MAX": "2"}
"""Environment variables: all threads share two arenas. Contention is low, because of Python's global lock."""


def release_free_memory() -> None:
    """Return the free pages of all arenas to the system; takes milliseconds per 100 MiB."""
    if hasattr(_GLIBC, "malloc_trim"):
        _GLIBC.malloc_trim(0)


@contextmanager
def without_collections() -> Iterator[None]:
    """Suspend garbage collection within the block, for imports: they make many objects and little garbage.

    Loading torch and transformers takes a fifth less time without the collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
