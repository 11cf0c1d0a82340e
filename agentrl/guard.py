"""Runs a command, and kills its whole process group when the parent process dies.

`python -m agentrl.guard --parent-pid PID [--api-key-stdin] -- COMMAND ...`

With --api-key-stdin, the first line of standard input is an API key. The command gets it as `api-key` in
`--config FILE`, which only its owner can read. So the key is in no command line, which all users of a machine
can see, and in no environment, which children inherit. SGLang logs all its arguments, so the key is masked in
its output.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

_WATCH_INTERVAL_S = 0.5
_LAST_WORDS_S = 1.0
_MISUSE_STATUS = 2
_HIDDEN = b"(the API key)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agentrl.guard", description="Run a command that must not outlive its starter."
    )
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--api-key-stdin", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    command = list(options.command)
    if options.api_key_stdin and "--config" in command:
        sys.stderr.write(
            "error: a server takes one --config, and that with its API key is written here; put what yours "
            "holds into rollout.sglang.args\n"
        )
        return _MISUSE_STATUS
    # The signal reaches the whole group; the guard only waits until the command has handled it.
    signal.signal(signal.SIGTERM, _ignore)
    signal.signal(signal.SIGINT, _ignore)
    with ExitStack() as stack:
        if options.api_key_stdin:
            key = sys.stdin.readline().rstrip("\n")
            command += ["--config", stack.enter_context(_key_file(key))]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            stack.enter_context(_copied(process, key.encode()))
        else:
            process = subprocess.Popen(command)
        while True:
            try:
                return _status(process.wait(timeout=_WATCH_INTERVAL_S))
            except subprocess.TimeoutExpired:
                if os.getppid() != options.parent_pid:
                    stack.close()
                    os.killpg(os.getpgrp(), signal.SIGKILL)


@contextmanager
def _key_file(key: str) -> Iterator[str]:
    """Yield the path of a YAML file with the key, and delete it afterwards."""
    with tempfile.TemporaryDirectory(prefix="agentrl-key-") as folder:  # mode 0700
        file = Path(folder) / "key.yaml"
        file.write_text(f"api-key: {json.dumps(key)}\n")  # JSON is YAML
        yield str(file)


@contextmanager
def _copied(process: subprocess.Popen[bytes], key: bytes) -> Iterator[None]:
    """Copy the output of the process to our standard output, line by line, with the key masked."""
    lines = process.stdout
    assert lines is not None

    def copy() -> None:
        for line in lines:
            sys.stdout.buffer.write(line.replace(key, _HIDDEN))
            sys.stdout.buffer.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_LAST_WORDS_S)  # a grandchild may hold the pipe for longer


def _ignore(number: int, frame: FrameType | None) -> None:
    # A handler instead of SIG_IGN, which the command would inherit.
    return


def _status(code: int) -> int:
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
