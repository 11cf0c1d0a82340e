"""Ranks of a world, forked from a program that has imported what each of them needs: an import costs as much
as a rank's work.

A program of its own, because a test process has threads, and what they hold stays held in a fork.
"""

import importlib
import os
import subprocess
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import torch

from parts.programs import PROGRAM

LATE = (
    "agentrl.learner.checkpoint",
    "peft",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.models.qwen2.modeling_qwen2",
)
"""What a learner imports only when it is built or saved."""


def run_ranks(calls: Iterable[tuple[Callable[..., object], tuple[Any, ...]]]) -> int:
    """Run each (function, arguments) in a fork of this process, all at once; return how many failed."""
    for name in LATE:
        importlib.import_module(name)
    torch.set_num_threads(1)
    children = [_fork(function, arguments) for function, arguments in calls]
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def run_program(file: str, *arguments: object, timeout_s: float) -> None:
    """Run a test file as a program, one thread a rank; fail with what it wrote to stderr."""
    done = subprocess.run(
        [*PROGRAM, file, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


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
