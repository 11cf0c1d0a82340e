"""A Python interpreter that keeps its variables from call to call, in any box where commands can be run.

    python3 -c SOURCE call SOURCE <request    runs one piece of code: starts the interpreter if there is none
    python3 -c SOURCE serve FOLDER            the interpreter

They share a folder: a pipe with numbers of calls, a file that the interpreter keeps locked while it lives,
and for each call its code, its output and its end.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import fcntl
import json
import linecache
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

FOLDER = os.path.join(tempfile.gettempdir(), "python-interpreter")
START_S, INTERRUPT_S, POLL_S = 10.0, 2.0, 0.005
LONGEST_POLL_S = 0.1
NUMBER_BYTES = 13  # twelve digits and the end of the line


def serve(folder: str) -> None:
    """Run code for ever."""
    with open(os.path.join(folder, "alive"), "w") as alive:
        alive.write(str(os.getpid()))
        alive.flush()
        fcntl.lockf(alive, fcntl.LOCK_EX)
        # Read and write: the pipe does not end between two calls.
        numbers = os.open(os.path.join(folder, "numbers"), os.O_RDWR | os.O_CLOEXEC)
        variables: dict[str, Any] = {"__name__": "__main__"}
        while True:
            try:
                number = os.read(numbers, NUMBER_BYTES).decode().strip()
                status = run_captured(os.path.join(folder, number), f"<call {number}>", variables)
                with open(os.path.join(folder, f"{number}.new"), "w") as file:
                    file.write(status)
                os.rename(file.name, os.path.join(folder, f"{number}.end"))
                if status == "exit":
                    return
            except KeyboardInterrupt:  # it came too late for the call that it was meant for
                continue


def run_captured(base: str, name: str, variables: dict[str, Any]) -> str:
    """Run the code of `base`.py with its output in `base`.out; return ok, error or exit."""
    output = os.open(f"{base}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    try:
        with open(f"{base}.py", encoding="utf-8") as file:
            return run_code(file.read(), name, variables)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # the file is full, or the code closed the stream
                continue


def run_code(source: str, name: str, variables: dict[str, Any]) -> str:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), variables)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), variables)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
        return "ok"
    except SystemExit:
        return "exit"
    except BaseException as error:  # noqa: BLE001 - boundary: the model's own code
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == run_code.__code__.co_filename:
            trace = trace.tb_next
        with contextlib.suppress(OSError, ValueError):  # the file is full, or the code closed the stream
            traceback.print_exception(type(error), error, trace)
        return "error"


def is_alive(folder: str) -> bool:
    """Return whether an interpreter holds its lock. The lock ends with the process, whatever ended it."""
    try:
        with open(os.path.join(folder, "alive"), "r+") as alive:
            fcntl.lockf(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


def start(folder: str, source: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder, 0o700)
    os.mkfifo(os.path.join(folder, "numbers"), 0o600)
    null = subprocess.DEVNULL
    command = [sys.executable, "-c", source, "serve", folder]
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)


def send(folder: str, number: str) -> bool:
    """Give a call to the interpreter; return False if none reads."""
    try:
        numbers = os.open(os.path.join(folder, "numbers"), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    os.write(numbers, f"{number}\n".encode())
    os.close(numbers)
    return True


def wait(folder: str, end: str, timeout_s: float) -> bool:
    """Wait for the end of a call; return False if it has not come, or the interpreter has died."""
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S
    while time.monotonic() < deadline:
        if os.path.exists(end):
            return True
        if not is_alive(folder):
            return os.path.exists(end)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_POLL_S)
    return os.path.exists(end)


def call(request: dict[str, Any], source: str) -> int:
    """Run one piece of code and print its output; return 0 if it raised nothing."""
    if not is_alive(FOLDER):
        start(FOLDER, source)
    number = os.urandom(6).hex()
    base = os.path.join(FOLDER, number)
    with open(f"{base}.py", "w", encoding="utf-8", errors="replace") as file:
        file.write(request["code"])
    deadline = time.monotonic() + START_S
    while not send(FOLDER, number):
        if time.monotonic() > deadline:
            sys.stdout.write("[the interpreter did not start]\n")
            return 1
        time.sleep(POLL_S)
    has_ended = wait(FOLDER, f"{base}.end", request["timeout_s"])
    note = "" if has_ended else stop(f"{base}.end", request["timeout_s"])
    show(f"{base}.out")
    status = "error"
    if os.path.exists(f"{base}.end"):
        with open(f"{base}.end") as file:
            status = file.read()
    if status == "exit":
        note = "[the interpreter has ended: its variables are gone]"
    if note:
        sys.stdout.write(f"{note}\n")
    for kind in ("py", "out", "end"):
        if os.path.exists(f"{base}.{kind}"):
            os.unlink(f"{base}.{kind}")
    return 0 if status == "ok" else 1


def stop(end: str, after_s: float) -> str:
    """Interrupt a call that takes too long; return what became of it."""
    if not is_alive(FOLDER):
        return "[the interpreter was ended: its variables are gone]"
    with open(os.path.join(FOLDER, "alive")) as file:
        pid = int(file.read())
    os.kill(pid, signal.SIGINT)
    if wait(FOLDER, end, INTERRUPT_S):
        return f"[interrupted after {after_s:g} s: it took too long; variables are kept]"
    if is_alive(FOLDER):
        os.kill(pid, signal.SIGKILL)
    return f"[ended after {after_s:g} s: it took too long; variables are gone]"


def show(path: str) -> None:
    sys.stdout.flush()
    try:
        with open(path, "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
    except FileNotFoundError:
        pass
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        folder, sys.argv[:] = sys.argv[2], [""]
        for stream in (sys.stdout, sys.stderr):  # in the order of writing
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        serve(folder)
    else:
        sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
        sys.exit(call(json.loads(sys.stdin.read()), sys.argv[2]))
