"""Runs a command, and kills its whole process group when the parent process dies.

`python -m agentrl.guard --parent-pid PID [--api-key-stdin] [--whole-tree] -- COMMAND ...`

With --api-key-stdin, the first line of standard input is an API key. The command gets it as `api-key` in
`--config FILE`, which only its owner can read. So the key is in no command line, which all users of a machine
can see, and in no environment, which children inherit. SGLang logs all its arguments, so the key is masked in
its output.

With --whole-tree, nothing that the command started outlives it, not even what has left its process group.
When the parent dies, the command first gets a moment: the end of its input tells it. SIGTERM to the guard
alone kills all of it at once.

If it is run by its file, Python needs -P: the file's folder has a module `types`, which must not be found.

With --then-kill and no command, it only waits for the parent's death, and kills these processes if they have
not ended soon after.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

_WATCH_INTERVAL_S = 0.5
_LAST_WORDS_S = 1.0
_CLEAN_UP_S = 5.0
_LEFT_S = 3.0
_MAX_SWEEPS = 50
_PR_SET_CHILD_SUBREAPER = 36
_MISUSE_STATUS = 2
_STUCK_STATUS = 1
_HIDDEN = b"(the API key)"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m agentrl.guard", description="Run a command that must not outlive its starter."
    )
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--api-key-stdin", action="store_true")
    parser.add_argument("--whole-tree", action="store_true")
    parser.add_argument("--then-kill", type=int, nargs="+", metavar="PID")
    parser.add_argument("command", nargs="*")
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
    if options.then_kill:
        return _kill_after(options.parent_pid, options.then_kill)
    if options.whole_tree:
        return _run_tree(command, options.parent_pid)
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


def _kill_after(parent_pid: int, pids: list[int]) -> int:
    """Kill the processes when the parent is gone; a process that has got the id of one meanwhile stays."""
    known = {pid: _start_of(pid) for pid in pids}
    while os.getppid() == parent_pid:
        time.sleep(_WATCH_INTERVAL_S)
    time.sleep(_LEFT_S)
    for pid, start in known.items():
        if start is not None and _start_of(pid) == start:
            os.kill(pid, signal.SIGKILL)
    return 0


def _start_of(pid: int) -> str | None:
    """Return when a process was started, in ticks of the kernel; None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _run_tree(command: list[str], parent_pid: int) -> int:
    """Run a command, and kill all that it started when it has ended, when the parent has died, or on
    SIGTERM.
    """
    # What loses its parent becomes a child of the guard, whatever group or session it is in.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    is_told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_told.set())
    process = subprocess.Popen(command)
    deadline = float("inf")
    while not is_told.is_set() and time.monotonic() < deadline:
        try:
            process.wait(timeout=_WATCH_INTERVAL_S)
            break
        except subprocess.TimeoutExpired:
            _reap_others(process.pid)
            if os.getppid() != parent_pid:
                deadline = min(deadline, time.monotonic() + _CLEAN_UP_S)
    process.kill()
    try:
        status = _status(process.wait(timeout=_CLEAN_UP_S))
    except subprocess.TimeoutExpired:  # stuck in the kernel
        status = _STUCK_STATUS
    _kill_descendants()
    return status


def _reap_others(pid: int) -> None:
    """Wait for children that have ended, except `pid`."""
    while (found := _ended_child()) not in (None, pid):
        os.waitpid(found, 0)


def _ended_child() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def _kill_descendants() -> None:
    """Kill until nothing is left: a killed process makes its children ours."""
    for _ in range(_MAX_SWEEPS):
        found = _descendants(os.getpid())
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not found:
            return
        time.sleep(0.01)
        _reap_others(0)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, ahead = [], [root]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


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
