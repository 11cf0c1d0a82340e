"""Freed memory stays with the process: the second allocation of a large block asks the kernel for no page."""

import subprocess
import sys

PROGRAM = """
import ctypes, resource
from agentrl.learner.ranks import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
keep_freed_memory()
def faults_of_a_block():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults_of_a_block(), faults_of_a_block())
"""


def test_a_freed_block_is_used_again():
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    first, second = map(int, output.split())
    assert first >= 32, "64 MiB are at least 32 pages, of 2 MiB each"
    assert second < 8
