"""A process beside a command that plays in its own process: it tells which plugin ended the command."""

from __future__ import annotations

import os
import signal
import time

POLL_S = 0.1
PLAYING = frozenset({"play", "eval", "generate", "score"})
"""Commands in whose process plugins run."""
ENDED_STATUS = 1


def start_witness(command: str) -> None:
    """Start the process, if the command is one of PLAYING. Call it before there is another thread."""
    if command not in PLAYING:
        return
    from agentrl.plugins.last_words import keep_last_words, read_file_at

    file = os.fdopen(os.memfd_create("last_words"), "wb+")
    keep_last_words(file, exit_status=ENDED_STATUS)
    parent = os.getpid()
    if os.fork() != 0:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # who reads the output of the command must see its end
        os.dup2(nothing, descriptor)
    while os.getppid() == parent:
        time.sleep(POLL_S)
    words = read_file_at(file.fileno())
    if words is not None:
        os.write(2, f"error (infrastructure): {words.line}\n".encode(errors="replace"))
    os._exit(0)
