"""A store of attempts, read by hand: also what stands there twice."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def stored_keys(folder: Path) -> list[str]:
    """Return the keys of all attempts in a store, in the order in which they were kept."""
    keys = []
    for part in sorted(folder.glob("*.attempts")):
        data = part.read_bytes()
        while len(data) >= 12:
            _, length, _ = struct.unpack_from("<4sII", data)
            if len(data) < 12 + length:
                break
            (size,) = struct.unpack_from("<I", data, 12)
            keys.append(json.loads(data[16 : 16 + size])["key"])
            data = data[12 + length :]
    return keys
