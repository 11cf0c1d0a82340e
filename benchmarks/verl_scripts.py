"""Import every run script and config of a checkout of verl, and count what becomes of them.

`TABLE` has the files in its first column, relative to the checkout, and what became of them at an earlier
commit in its last one, tab-separated after a heading.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from machine import write_result
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import AgentRLError
from agentrl.extras.verl.importing import source

SECRET = "a token of the importer's environment"
SECONDS = 120
SECTIONS = {
    # heading of the account -> class
    "will not run as it is": "will not run",
    "trains something else": "something else",
    "unknown": "unknown keys",
}


class Hang(BaseException):
    """Raised when an import takes too long; nothing that is imported catches it."""


@dataclass(frozen=True)
class Imported:
    """What became of one file: its class, the keys that decided it with their reasons, and the seconds."""

    kind: str
    reasons: tuple[str, ...]
    has_note_of_servers: bool
    seconds: float


def imported(file: str) -> Imported:
    started = time.monotonic()
    signal.alarm(SECONDS)
    done = CliRunner().invoke(app, ["config", "import", file])
    signal.alarm(0)
    reasons = decisive(done.stderr)
    is_line = isinstance(done.exception, AgentRLError)
    if isinstance(done.exception, Hang):
        kind = "hang"
    elif SECRET in done.output:
        kind = "reads the environment"
    elif done.exception is not None and not is_line and not isinstance(done.exception, SystemExit):
        kind = "traceback"
    elif is_line:
        kind, reasons = "refused", [" ".join(str(done.exception).split())[:160]]
    elif done.exit_code == 0:
        kind = "clean"
    else:
        kind = next(kind for title, kind in SECTIONS.items() if f"\n{title}: " in f"\n{done.stderr}")
    has_note = any(text in done.stderr for text in ("holds a server of this model", "GPUs of their own here"))
    return Imported(kind, tuple(reasons), has_note, time.monotonic() - started)


def decisive(account: str) -> list[str]:
    """Return `key: reason` of what an account lists first; values are left out."""
    found, title = [], ""
    for line in account.splitlines():
        if not line.startswith("  "):
            title = line.partition(":")[0]
        elif title in SECTIONS:
            key, _, rest = line.strip().partition(" = ")
            reason = rest.partition(": ")[2] if rest else key.partition(": ")[2]
            found.append(f"{key.partition(': ')[0]}: {reason}".removesuffix(": ")[:160])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("table", type=Path)
    parser.add_argument("--verl", required=True, help="commits of verl and of its recipes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [line.split("\t") for line in args.table.read_text().splitlines()[1:]]
    out = args.out.resolve() if args.out else None
    os.chdir(args.checkout)
    os.environ["SECRET_TOKEN"] = SECRET
    source._parse = functools.cache(source._parse)  # most scripts set the same keys
    signal.signal(signal.SIGALRM, stop)
    found = {row[0]: imported(row[0]) for row in rows}
    result = counts({row[0]: row[-1] for row in rows}, found)
    print(json.dumps(result["now"]))
    write_result(out, {"verl": args.verl, **result})


def stop(number: int, frame: FrameType | None) -> None:
    raise Hang


def counts(before: Mapping[str, str], found: Mapping[str, Imported]) -> dict[str, object]:
    """Return the counts of classes before and now, of both together, and of the reasons by class."""
    both: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for file, one in found.items():
        both[before[file]][one.kind] += 1
        reasons[one.kind].update(set(one.reasons))
    return {
        "what": "`config import` of verl's run scripts and configs, before (11c2d9dd) and now",
        "files": len(found),
        "before": dict(Counter(before.values()).most_common()),
        "now": dict(Counter(one.kind for one in found.values()).most_common()),
        "before_to_now": {name: dict(kinds.most_common()) for name, kinds in both.items()},
        "with_note_of_servers": sum(one.has_note_of_servers for one in found.values()),
        "of_them_clean": sum(one.has_note_of_servers and one.kind == "clean" for one in found.values()),
        "slowest_s": round(max(one.seconds for one in found.values()), 1),
        "reasons": {kind: dict(each.most_common()) for kind, each in reasons.items()},
        "clean": sorted(file for file, one in found.items() if one.kind == "clean"),
    }


if __name__ == "__main__":
    main()
