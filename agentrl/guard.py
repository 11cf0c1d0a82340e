"""A process that runs a command and ends its whole process group when the starter is gone: for servers that cannot watch it themselves.

`python -m agentrl.guard --parent-pid PID [--api-key-env NAME] -- COMMAND ...`

With --api-key-env the command gets `--config FILE`, a file that its owner alone may read, with the value of that variable as `api-key`:
the key stands in no command line, which all users of a machine see.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

_WATCH_INTERVAL_S = 0.5
_MISUSE_STATUS = 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m agentrl.guard", description="Run a command that must not outlive its starter.")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--api-key-env")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    command = list(options.command)
    if options.api_key_env and (why := _why_no_key(options.api_key_env, command)):
        sys.stderr.write(f"error: {why}\n")
        return _MISUSE_STATUS
    # The signal goes to the whole group; the guard only waits for what the command makes of it.
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGINT, _ignore)
    with ExitStack() as stack:
        if options.api_key_env:
            command += ["--config", stack.enter_context(_key_file(os.environ[options.api_key_env]))]
        process = subprocess.Popen(command)
        while True:
            try:
                return _status(process.wait(timeout=_WATCH_INTERVAL_S))
            except subprocess.TimeoutExpired:
                if os.getppid() != options.parent_pid:
                    stack.close()
                    os.killpg(os.getpgrp(), signal.SIGKILL)


def _why_no_key(variable: str, command: list[str]) -> str | None:
    if not os.environ.get(variable):
        return f"the environment variable {variable} with the server's API key is not set on this machine"
    if "--config" in command:
        return "a server takes one --config, and that with its API key is written here; put what yours holds into rollout.sglang.args"
    return None


@contextmanager
def _key_file(key: str) -> Iterator[str]:
    """Yield the path of a YAML file with the key; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="agentrl-key-") as folder:  # mode 0700
        file = Path(folder) / "key.yaml"
        file.write_text(f"api-key: {json.dumps(key)}\n")  # JSON is YAML
        yield str(file)


def _ignore(number: int, frame: FrameType | None) -> None:
    # A handler, not SIG_IGN: that would be inherited by the command.
    return


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
