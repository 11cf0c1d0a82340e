"""Answers the host's requests inside of a box: greet, run, read, write, pack, unpack.

Requests and answers are frames: two lengths of 4 bytes, a JSON object, a body. Without arguments, descriptor
3 brings requests, and 4 takes answers; the working folder and the limits are there. With `once`, one request
is answered, in files. With `stay FOLDER REQUEST`, one request is answered on standard output, and the working
folder stays. With `pipes SETTINGS`, standard input and output are used, and the box is prepared as
SETTINGS say, a JSON object:

    folder          working folder; it is made
    origin          folder whose files are copied into it; null: none
    user            number of the user and group to become; null: none
    lifetime_s      seconds after which the servant ends
    limits          name of a limit of `resource` -> value
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import glob
import io
import json
import os
import resource
import select
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from typing import Any, BinaryIO

POLL_S = 0.02
"""Seconds between looks at a command that has closed its output and still runs, or the other way round."""
ROOM_S = 5.0
"""Seconds that a killed command has to end."""
TOO_OLD = 62
"""Exit code of a servant whose lifetime has passed, as in command_place.py."""
PR_SET_DUMPABLE = 4
ANSWERS = f"{tempfile.gettempdir()}/agentrl-answer-"
MAX_TOLD_BYTES = 2**20
"""Larger answers of `stay` are left in a file."""

host = select.poll()
"""Polled for the end of the requests, while a command runs: nobody waits for its result then."""


class Kept:
    """The beginning and the end of an output, at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._head, self._tail = bytearray(), bytearray()
        self.num_lost = 0

    def add(self, piece: bytes) -> None:
        room = self._half - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:] if room < len(piece) else b""
        if (extra := len(self._tail) - self._half) > 0:
            del self._tail[:extra]
            self.num_lost += extra

    def value(self) -> bytes:
        gap = f"\n[... {self.num_lost} bytes left out ...]\n".encode() if self.num_lost else b""
        return bytes(self._head) + gap + bytes(self._tail)


def run(request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    started = time.monotonic()
    with tempfile.TemporaryFile() as stdin:
        stdin.write(body)
        stdin.seek(0)
        process = subprocess.Popen(
            request["command"],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if request["is_merged"] else subprocess.PIPE,
            start_new_session=True,
        )
    outputs = [stream for stream in (process.stdout, process.stderr) if stream is not None]
    kept = {stream.fileno(): Kept(request["max_output_bytes"]) for stream in outputs}
    is_timed_out = not collect(process, kept, started + request["timeout_s"])
    if is_timed_out:
        end(process)
    drain(kept)
    for stream in outputs:
        stream.close()
    texts = [one.value() for one in kept.values()]
    code = process.returncode
    return {
        "exit_code": 128 - code if code < 0 else code,
        "num_stdout": len(texts[0]),
        "is_truncated": any(one.num_lost for one in kept.values()),
        "is_timed_out": is_timed_out,
        "wall_s": time.monotonic() - started,
    }, b"".join(texts)


def collect(process: subprocess.Popen[bytes], kept: dict[int, Kept], deadline: float) -> bool:
    """Read outputs until the command has ended; return False at its deadline.

    A process that it left in the background may hold the outputs open: they are not waited for.
    """
    waiting = set(kept)
    while process.poll() is None:
        if host.poll(0):
            os._exit(0)
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if not waiting:
            time.sleep(min(POLL_S, left))
        for descriptor in select.select(list(waiting), [], [], min(POLL_S, left))[0] if waiting else ():
            if piece := os.read(descriptor, 65536):
                kept[descriptor].add(piece)
            else:
                waiting.discard(descriptor)
    return True


def end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(ROOM_S)


def drain(kept: dict[int, Kept]) -> None:
    """Read what is in the pipes. At most a pipe's size: a process in the background may write for ever."""
    for descriptor, one in kept.items():
        os.set_blocking(descriptor, False)
        for _ in range(32):
            try:
                piece = os.read(descriptor, 65536)
            except BlockingIOError:
                break
            if not piece:
                break
            one.add(piece)


def read(request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    # Non-blocking: a pipe with this name must not be waited for.
    descriptor = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(21, "it is a folder")
        if not stat.S_ISREG(found.st_mode):
            raise OSError(22, "it is not a plain file")
        content = file.read(request["max_bytes"] + 1)
    if len(content) > request["max_bytes"]:
        raise OSError(27, f"it has more than {request['max_bytes']} bytes")
    return {}, content


def write(request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    path = request["path"]
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(body)
    return {}, b""


def pack(request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    """Return the working folder as a tar archive, whose bytes are equal for equal files."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym()):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = 0 if member.issym() else int(member.mtime)  # unpacking does not restore that of a link
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        packed.append(member.size)
        if sum(packed) > request["max_bytes"]:
            raise OSError(27, f"the working folder has more than {request['max_bytes']} bytes")
        return member

    packed: list[int] = []
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT, dereference=False) as tar:
        tar.inodes = {}  # type: ignore[attr-defined]  # hard links are files of their own
        for name in sorted(os.listdir(".")):
            tar.add(name, filter=plain)
    return {}, archive.getvalue()


def unpack(request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        with tarfile.open(fileobj=io.BytesIO(body), mode="r:*") as tar:
            clear(".")
            # The walls of the box decide what may be written. Filters would refuse links that a model made.
            trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
            tar.extractall(".", **trusted)  # type: ignore[arg-type]
    except (tarfile.TarError, EOFError) as error:
        raise OSError(22, f"the archive cannot be unpacked: {error}") from error
    return {}, b""


def clear(folder: str) -> None:
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def greet(request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    return {}, b""


VERBS = {"greet": greet, "run": run, "read": read, "write": write, "pack": pack, "unpack": unpack}


def answer(request: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        return VERBS[request["verb"]](request, body)
    except FileNotFoundError as error:
        return {"refused": f"no such file: {error.filename}", "is_missing": True}, b""
    except OSError as error:
        return {"refused": error.strerror or str(error)}, b""
    except (ValueError, MemoryError, subprocess.SubprocessError) as error:  # a zero byte in a path
        return {"refused": str(error) or type(error).__name__}, b""


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    host.register(requests, 0)  # its hang-up is always reported
    while len(lengths := requests.read(8)) == 8:
        if os.getpid() == 1:
            reap()
        request = json.loads(requests.read(int.from_bytes(lengths[:4], "big")))
        head, content = answer(request, requests.read(int.from_bytes(lengths[4:], "big")))
        text = json.dumps({"id": request["id"], **head}).encode()
        answers.write(len(text).to_bytes(4, "big") + len(content).to_bytes(4, "big") + text + content)
        answers.flush()


def reap() -> None:
    """Collect processes whose parents have ended: the first process of a box gets them as children."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def pipes() -> tuple[int, int]:
    """Return standard input and output under other numbers, which commands do not inherit."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)
    return requests, answers


def prepare(settings: dict[str, Any]) -> None:
    """Make the working folder, become the user of the box, and set the limits, for good."""
    os.makedirs(settings["folder"], exist_ok=True)
    if (user := settings["user"]) is not None:
        os.chown(settings["folder"], user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.chdir(settings["folder"])
    if settings["origin"] is not None:
        shutil.copytree(settings["origin"], ".", symlinks=True, dirs_exist_ok=True)
    for name, value in settings["limits"].items():
        kind = getattr(resource, name)
        most = resource.getrlimit(kind)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))
    timer = threading.Timer(settings["lifetime_s"], os._exit, (TOO_OLD,))
    timer.daemon = True
    timer.start()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # commands must not trace this process


def once() -> None:
    """Answer the request in the file `request` by a file `answer`. The working folder comes from and goes to
    `folder.tar`.
    """
    place = os.getcwd()
    with open("request", "rb") as file:
        lengths = file.read(8)
        request = json.loads(file.read(int.from_bytes(lengths[:4], "big")))
        body = file.read()
    os.mkdir("work")
    os.chdir("work")
    if os.path.exists(f"{place}/folder.tar"):
        with open(f"{place}/folder.tar", "rb") as file:
            unpack({}, file.read())
    head, content = answer(request, body)
    try:
        folder = pack({"max_bytes": request["max_folder_bytes"]}, b"")[1]
    except OSError as error:
        head, content = {"refused": error.strerror}, b""
    else:
        with open(f"{place}/folder.tar", "wb") as file:
            file.write(folder)
    text = json.dumps({"id": request["id"], **head}).encode()
    with open(f"{place}/answer", "wb") as file:
        file.write(len(text).to_bytes(4, "big") + len(content).to_bytes(4, "big") + text + content)


def stay(folder: str, request_text: str) -> None:
    """Answer a request in `folder`. The request is a frame in base64, or @ and the path of a file with the
    frame; so is what is written to standard output. Files of earlier answers are removed.
    """
    for path in glob.glob(f"{ANSWERS}*"):
        os.unlink(path)
    if request_text.startswith("@"):
        with open(request_text[1:], "rb") as file:
            frame = file.read()
        os.unlink(request_text[1:])
    else:
        frame = base64.b64decode(request_text)
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    num_head = int.from_bytes(frame[:4], "big")
    head, content = answer(json.loads(frame[8 : 8 + num_head]), frame[8 + num_head :])
    text = json.dumps(head).encode()
    frame = len(text).to_bytes(4, "big") + len(content).to_bytes(4, "big") + text + content
    told = base64.b64encode(frame).decode()
    if len(frame) > MAX_TOLD_BYTES:
        path = f"{ANSWERS}{os.getpid()}"
        with open(path, "wb") as kept:
            kept.write(frame)
        told = f"@{path}"
    sys.stdout.write(told)


def begin(arguments: list[str]) -> tuple[int, int]:
    """Return the descriptors of requests and answers, in a box that is ready."""
    if not arguments:
        os.set_inheritable(3, False)
        os.set_inheritable(4, False)
        return 3, 4
    descriptors = pipes()
    prepare(json.loads(arguments[1]))
    os.dup2(0, 2)  # what went wrong before this was for the host
    return descriptors


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    os.umask(0o022)
    if sys.argv[1:] == ["once"]:
        once()
    elif sys.argv[1:2] == ["stay"]:
        stay(*sys.argv[2:])
    else:
        incoming, outgoing = begin(sys.argv[1:])
        main(os.fdopen(incoming, "rb"), os.fdopen(outgoing, "wb"))
