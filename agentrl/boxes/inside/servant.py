"""Answers the host's requests inside of a box of processes: run, read, write, pack, unpack.

Descriptor 3 brings requests, 4 takes answers. Both are frames: two lengths of 4 bytes, a JSON object, a body.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from typing import Any, BinaryIO

POLL_S = 0.02
"""Seconds between looks at a command that has closed its output and still runs, or the other way round."""
ROOM_S = 5.0
"""Seconds that a killed command has to end."""


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
            # The walls of the box decide what may be written. Filters would refuse links that a model made.
            tar.extractall(".", filter="fully_trusted")
    except (tarfile.TarError, EOFError) as error:
        raise OSError(22, f"the archive cannot be unpacked: {error}") from error
    return {}, b""


VERBS = {"run": run, "read": read, "write": write, "pack": pack, "unpack": unpack}


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
    while len(lengths := requests.read(8)) == 8:
        request = json.loads(requests.read(int.from_bytes(lengths[:4], "big")))
        head, content = answer(request, requests.read(int.from_bytes(lengths[4:], "big")))
        text = json.dumps({"id": request["id"], **head}).encode()
        answers.write(len(text).to_bytes(4, "big") + len(content).to_bytes(4, "big") + text + content)
        answers.flush()


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    os.set_inheritable(3, False)
    os.set_inheritable(4, False)
    os.umask(0o022)
    main(os.fdopen(3, "rb"), os.fdopen(4, "wb"))
