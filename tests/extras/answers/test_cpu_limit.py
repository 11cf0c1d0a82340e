"""The limit of CPU time around a block."""

from __future__ import annotations

import signal
import threading

import pytest

from agentrl.extras.answers.cpu_limit import TooCostlyError, cpu_limit

SIGNAL, TIMER = signal.SIGVTALRM, signal.ITIMER_VIRTUAL


def spin() -> None:
    while True:
        pass


def test_what_never_ends_is_too_costly_and_leaves_nothing_behind():
    before = signal.getsignal(SIGNAL)
    with pytest.raises(TooCostlyError, match=r"more than 0\.01 s of CPU"), cpu_limit(0.01):
        spin()
    assert signal.getitimer(TIMER) == (0.0, 0.0)
    assert signal.getsignal(SIGNAL) is before


def test_what_ends_in_time_leaves_nothing_behind():
    before = signal.getsignal(SIGNAL)
    with cpu_limit(100.0):
        left, again = signal.getitimer(TIMER)
        assert 90.0 < left <= 100.1
        assert again <= 25.0
    assert signal.getitimer(TIMER) == (0.0, 0.0)
    assert signal.getsignal(SIGNAL) is before
    with pytest.raises(KeyError), cpu_limit(100.0):
        raise KeyError
    assert signal.getitimer(TIMER) == (0.0, 0.0)


def test_a_computation_that_swallows_the_first_interruption_is_interrupted_again():
    def swallows() -> None:
        try:
            spin()
        finally:
            spin()

    with pytest.raises(TooCostlyError), cpu_limit(0.01):
        swallows()


def test_another_thread_is_not_limited():
    """Signals reach the main thread only."""
    seen: list[object] = []

    def work() -> None:
        with cpu_limit(100.0):
            seen.append(signal.getitimer(TIMER))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0.0, 0.0)]
