"""Checks of `agentrl doctor` that end badly, by their names."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.extras.doctor.diagnosis import Diagnosis


def diagnose(subject):
    how = sys.argv[1]
    yield Diagnosis(how, "ok", "said before the end")
    if how == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(subject.config.trainer.run_dir).write_text(str(child.pid))
        time.sleep(1000)
    if how == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exits":
        sys.stderr.write("one\nthe last words\n")
        os._exit(3)
    if how == "raises":
        raise ZeroDivisionError("no reason\nat all")
    if how == "refuses":
        raise ConfigError("a key is wrong; use another")
    print("what a library says")
    yield Diagnosis(how, "slow", "two\nlines", "a cure", {"x_per_s": 1.5})
