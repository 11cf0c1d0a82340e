"""Code of one event loop awaited in the other, told from the error that it ends in: what went wrong, and the cure."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from typing import Literal

import trio

FOLDERS = {"asyncio": Path(asyncio.__file__).parent, "trio": Path(trio.__file__).parent}
UNKNOWN_YIELD = "unrecognized yield message"
"""What trio says of a future that is awaited under it."""


def foreign_loop(error: BaseException, runtime: Literal["asyncio", "trio"]) -> str | None:
    """Return where code of the other loop than `runtime` was awaited, as a clause; None if the error is another.

    Such code raises in its own library, for it does not find its loop: `no running event loop`, `must be called from async context`.
    """
    other = "trio" if runtime == "asyncio" else "asyncio"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(Path(frame.filename).is_relative_to(folder) for folder in FOLDERS.values())]
    is_raised_there = bool(frames) and Path(frames[-1].filename).is_relative_to(FOLDERS[other])
    is_refused = runtime == "trio" and isinstance(error, TypeError) and UNKNOWN_YIELD in str(error)
    if not (is_refused or (is_raised_there and isinstance(error, RuntimeError | AttributeError | TypeError))):
        return None
    at = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"awaits {other} code{at}, and runs under {runtime}"
