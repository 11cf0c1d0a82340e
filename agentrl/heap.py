"""Limits the memory growth of glibc's allocator in processes with many threads that run for days.

glibc has many heaps (arenas), each shared by a few threads. Memory freed in an arena is reused only by its
threads, and free memory between two live blocks is not returned to the system. So a process that allocates
blocks of ever changing sizes grows for hours, although it has no more live data. `FEW` limits the number of
arenas, and `release_free_memory` returns free pages. With other allocators, neither has an effect.
"""

from __future__ import annotations

import ctypes

_GLIBC = ctypes.CDLL(None)
FEW = {"MALLOC_ARENA_MAX": "2"}
"""Environment variables: all threads share two arenas. Contention is low, because of Python's global lock."""


def release_free_memory() -> None:
    """Return the free pages of all arenas to the system; takes milliseconds per 100 MiB."""
    if hasattr(_GLIBC, "malloc_trim"):
        _GLIBC.malloc_trim(0)
