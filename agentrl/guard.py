"""A process that runs a command and ends its whole process group when the starter is gone: for servers that cannot watch it themselves.

`python -m agentrl.guard --parent-pid PID [--api-key-env NAME] -- COMMAND ...`

With --api-key-env the command gets `--api-key` and the value of that variable, so that the key stands in no command line but the
server's own, which accepts it in no other way.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from types import FrameType

_WATCH_INTERVAL_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m agentrl.guard", description="Run a command that must not outlive its starter.")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--api-key-env")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    command = list(options.command)
    if options.api_key_env:
        command += ["--api-key", os.environ[options.api_key_env]]
    # The signal goes to the whole group; the guard only waits for what the command makes of it.
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGINT, _ignore)
    process = subprocess.Popen(command)
    while True:
        try:
            return _status(process.wait(timeout=_WATCH_INTERVAL_S))
        except subprocess.TimeoutExpired:
            if os.getppid() != options.parent_pid:
                os.killpg(os.getpgrp(), signal.SIGKILL)


def _ignore(number: int, frame: FrameType | None) -> None:
    # A handler, not SIG_IGN: that would be inherited by the command.
    return


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
