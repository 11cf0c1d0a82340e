"""How the C library hands out the memory of a rank that computes on the CPU."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_NEVER_BYTES = 2**31 - 1


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next allocation; for processes that compute alike over and over.

    glibc gives every block above 32 MiB back to the kernel when it is freed, and the kernel clears each page when it is asked for again:
    a quarter of an update whose microbatches are large. With another C library nothing happens.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _NEVER_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES)
