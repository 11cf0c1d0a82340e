"""Settings of the C library's allocator for ranks that compute on the CPU."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_NEVER_BYTES = 2**31 - 1


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next allocations.

    For ranks that repeat the same computation.

    By default glibc returns every block above 32 MiB to the kernel when it is freed, and the kernel zeroes
    each page when it is allocated again. This takes a quarter of an update with large microbatches. No effect
    with another C library.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _NEVER_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)
