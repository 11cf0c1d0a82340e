"""`versions.jsonl` of a run: every version of weights that was ever published from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import CheckpointError
from agentrl.tracking.seals import checked_lines

VERSIONS = "versions.jsonl"


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """what: `policy`, or which other weights. step: after which they were published."""

    version: int
    step: int
    what: str


def read_versions(path: Path) -> list[PublishedVersion]:
    """Return the records of a `versions.jsonl` in their order; [] if there is no such file.

    A last line that was cut off by a crash is ignored.

    Raises:
        CheckpointError: another line is no record, was changed, or a line before it is missing.
    """
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(checked_lines(path), start=1):
        try:
            raw = json.loads(line)
            one = PublishedVersion(raw["version"], raw["step"], raw["what"])
            if not (type(one.version) is type(one.step) is int and isinstance(one.what, str)):
                raise ValueError(f"version {one.version!r}, step {one.step!r}, what {one.what!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{path}, line {number}: no record of a version ({error}); move the file away to continue: "
                "versions go on after those of the checkpoints and the journal"
            ) from error
        found.append(one)
    return found
