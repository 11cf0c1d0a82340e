"""Recognizes errors caused by asyncio code awaited under trio, or trio code awaited under asyncio."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from typing import Literal

import trio

FOLDERS = {"asyncio": Path(asyncio.__file__).parent, "trio": Path(trio.__file__).parent}
UNKNOWN_YIELD = "unrecognized yield message"
"""Part of trio's error message when an asyncio future is awaited under it."""


def foreign_loop(error: BaseException, runtime: Literal["asyncio", "trio"]) -> str | None:
    """Return where code for the other event loop was awaited under `runtime`, as a clause; None if that is
    not the cause.

    Such code raises in its own library because its loop is not running: `no running event loop`, or
    `must be called from async context`.
    """
    other = "trio" if runtime == "asyncio" else "asyncio"
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not any(Path(frame.filename).is_relative_to(folder) for folder in FOLDERS.values())
    ]
    is_raised_there = bool(frames) and Path(frames[-1].filename).is_relative_to(FOLDERS[other])
    is_refused = runtime == "trio" and isinstance(error, TypeError) and UNKNOWN_YIELD in str(error)
    if not (is_refused or (is_raised_there and isinstance(error, RuntimeError | AttributeError | TypeError))):
        return None
    at = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"awaits {other} code{at}, but runs under {runtime}"
