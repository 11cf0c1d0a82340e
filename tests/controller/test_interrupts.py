"""Signals reach a run although Ray sets handlers of its own; the second one ends the process while the first
is still being heeded.
"""

import subprocess
import sys

PROGRAM = """
import os, signal, time
from agentrl.config.cluster import ClusterConfig
from agentrl.cluster.cluster import ray_session
from agentrl.interrupts import SAME_INTERRUPT_S, ending_at_the_second_interrupt, interruptible

try:
    with ending_at_the_second_interrupt(), interruptible(), ray_session(ClusterConfig(num_cpus=1)):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
            print("never: the signal was not heard", flush=True)
        finally:
            print("closing", flush=True)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)  # at once: the same one, handed on by a launcher
    print("interrupted", flush=True)
    time.sleep(SAME_INTERRUPT_S + 0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
    print("never: the second was not heard", flush=True)
"""


def test_the_first_signal_closes_everything_and_a_second_ends_at_once():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=250, check=False
    )
    assert ended.stdout.splitlines() == ["closing", "interrupted"], ended.stderr
    assert ended.returncode == 130
    assert "interrupted twice: ended at once" in ended.stderr
