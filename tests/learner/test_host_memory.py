"""Freed memory stays with the process: the next update asks the kernel for no page. But gaps do not grow."""

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


GAPS = """
import ctypes, psutil
from agentrl.heap import GapLimit
from agentrl.learner.ranks import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
keep_freed_memory()
process, limit = psutil.Process(), GapLimit()
def fill(num):
    blocks = [libc.malloc(1 << 20) for _ in range(num)]
    for block in blocks:
        ctypes.memset(block, 1, 1 << 20)
    for block in blocks[::2]:
        libc.free(block)
held = []
def check():
    held.append(process.memory_info().rss >> 20)
    limit.check()
    held.append(process.memory_info().rss >> 20)
fill(400)
check()
fill(20)
check()
fill(800)
check()
check()
fill(20)
check()
print(*held)
"""


def test_gaps_go_back_to_the_system_once_they_have_grown():
    """Every second block of what is allocated stays: the others are gaps."""
    output = subprocess.run(
        [sys.executable, "-c", GAPS], check=True, capture_output=True, text=True, timeout=120
    ).stdout
    first, first_after, small, small_after, large, large_after, usual, usual_after, *last = map(
        int, output.split()
    )
    assert first_after >= first - 8, "the first size is what growth is measured from"
    assert small_after >= small - 8, "less than a fifth more is kept"
    assert large >= small + 500
    assert large_after <= large - 350, "the gaps of all three rounds"
    assert usual_after >= usual - 8, "then the new size is the usual one"
    assert last[1] >= last[0] - 8
