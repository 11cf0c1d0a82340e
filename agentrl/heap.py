"""glibc's allocator in a process with many threads that lives for days.

It has a heap for each few threads (`FEW`: for all), and what is freed in one is used again by those threads only; what is freed between two
living pieces stays with the process. So a process that makes and drops pieces of ever other sizes grows for hours, though it holds no more
than in its first minutes. With another allocator than glibc's nothing happens here.
"""

from __future__ import annotations

import ctypes

_GLIBC = ctypes.CDLL(None)
FEW = {"MALLOC_ARENA_MAX": "2"}
"""Environment of a process whose threads share two heaps; Python's own lock lets one of them work at a time."""


def release_free_memory() -> None:
    """Give the free pages of all heaps back to the machine; takes milliseconds per 100 MiB."""
    if hasattr(_GLIBC, "malloc_trim"):
        _GLIBC.malloc_trim(0)
