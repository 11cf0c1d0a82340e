"""Ranks of a world: forks of a program that has imported what each of them needs, for an import costs as much
as a rank's work. The programs are forks too, of one process for all files (`parts.warm`).

Test processes have threads, and what these hold stays held in a fork: they fork nothing themselves.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from parts import warm


def run_ranks(calls: Iterable[tuple[Callable[..., object], tuple[Any, ...]]]) -> int:
    """Run each (function, arguments) in a fork of this process, all at once; return how many failed."""
    children = [_fork(function, arguments) for function, arguments in calls]
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def run_program(file: str, *arguments: object, timeout_s: float) -> None:
    """Run a test file as a program, one thread a rank; fail with what it wrote to stderr."""
    with begun_program(file, *arguments, timeout_s=timeout_s):
        pass


@contextmanager
def begun_program(file: str, *arguments: object, timeout_s: float) -> Iterator[None]:
    """Begin to run it, and wait for its end when the block has ended; end it if the block fails."""
    process = _warm_process(os.getpid())
    assert process.stdin is not None
    with tempfile.NamedTemporaryFile("r", prefix="program-") as output:
        request = {
            "argv": [file, *map(str, arguments)],
            "cwd": str(Path.cwd()),
            "environ": {**os.environ, "OMP_NUM_THREADS": "1"},
            "stderr": output.name,
        }
        process.stdin.write(json.dumps(request).encode() + b"\n")
        group = int(_line(process, timeout_s=WARM_UP_S))
        try:
            yield
            status = int(_line(process, timeout_s=timeout_s))
        except BaseException as error:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(group, signal.SIGKILL)
            _line(process, timeout_s=WARM_UP_S)
            error.add_note(f"what {file} wrote:\n{output.read()}")
            raise
        assert status == 0, output.read()


WARM_UP_S = 120.0


@cache
def _warm_process(owner: int) -> "subprocess.Popen[bytes]":
    """Start the process that forks programs: one for each process of tests; it ends with its stdin."""
    return subprocess.Popen(
        [sys.executable, str(Path(warm.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _line(process: "subprocess.Popen[bytes]", *, timeout_s: float) -> bytes:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    if not ready:
        raise TimeoutError(f"no end within {timeout_s:g} s")
    line = process.stdout.readline()
    assert line, f"the process that forks programs has ended: {process.wait()}"
    return line


def _fork(function: Callable[..., object], arguments: tuple[Any, ...]) -> int:
    child = os.fork()
    if child == 0:
        try:
            function(*arguments)
        except Exception:  # noqa: BLE001 - boundary: a child says why it fails and must not run the parent's code
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child
