"""A small package in the place of reasoning-gym, which `make test` does not install: pip compiles a part of
it. tests/extras/hubs/test_real_reasoning_gym.py has the real one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl.extras.hubs.generated import data_set
from agentrl.extras.hubs.reasoning_gym import _entry

FOLDER = Path(__file__).with_name("small_generators")


@contextmanager
def small_generators(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `import reasoning_gym` find the small package."""
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(FOLDER))
        patched.setenv("PYTHONPATH", str(FOLDER), prepend=os.pathsep)
        _forget()
        yield
    _forget()


def _forget() -> None:
    data_set.cache_clear()
    _entry.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        del sys.modules[name]


def origin(generator: str = "sums", index: int = 0, **changed: object) -> dict:
    """Return `extra_info` of a row."""
    values = {"generator": generator, "seed": 3, "size": 9, "index": index, "config": "{}", **changed}
    return {"reasoning_gym": values}
