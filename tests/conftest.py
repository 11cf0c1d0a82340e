"""Settings of all tests."""

import gc
import inspect
import logging
import os
import signal
from functools import partial

import pytest
import trio
from hypothesis import settings
from trio.testing import MockClock

# Before torch is loaded: with two threads, small operations mostly wait for a core on which another test
# process runs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A Ray that a test starts itself gives its workers a low priority otherwise, and they wait for the test
# processes beside them.
os.environ.setdefault("RAY_worker_niceness", "0")

# Collecting the tests makes a million objects that stay: looking through them for garbage would take a fifth
# of the time.
gc.disable()


SLOW_TIMEOUT_S = 1800
"""Of a slow test without a limit of its own: it ends what hangs, also on a busy machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_level():
    """A command that is called in this process may silence warnings (`agentrl simulate`): for itself only."""
    logger = logging.getLogger("agentrl")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def mock_clock() -> MockClock:
    """A clock that jumps to the next deadline when every task waits; an async test that asks for it runs on
    it.
    """
    return MockClock(autojump_threshold=0)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test in trio."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    given = {name: pyfuncitem.funcargs[name] for name in names}
    trio.run(partial(pyfuncitem.obj, **given), clock=given.get("mock_clock"))
    return True


# A shell starts its background jobs with Ctrl-C ignored, and whatever they start inherits that: commands of
# tests would not end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Deterministic examples, and no verdict by the clock: the machine that runs this may be busy.
settings.register_profile("agentrl", derandomize=True, deadline=None)
# `pytest --hypothesis-profile=more`: ten times the examples where a test takes its number from the profile.
settings.register_profile("more", derandomize=True, deadline=None, max_examples=1000)
settings.load_profile("agentrl")

collect_ignore = ["extras/testing/third_party_package"]
"""Its tests run where it is installed: see test_third_party.py."""
