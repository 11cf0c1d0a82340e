"""Whether another process makes the same tasks again, as the process of the reward must.

A generator may choose by Python's hashes of texts, which differ from process to process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from agentrl.errors import ConfigError, DataError
from agentrl.extras.hubs.generated import Generated
from agentrl.types import JsonObject

TIMEOUT_S = 600.0


def check_repeated(made: Sequence[tuple[Generated, JsonObject]]) -> None:
    """Make these items in a new process and compare the questions.

    Raises:
        ConfigError: a generator makes another question there.
        DataError: the process failed.
    """
    origins = json.dumps([origin.row() for origin, _ in made])
    command = [
        sys.executable,
        "-P",
        "-c",
        "from agentrl.extras.hubs.repeated import write_questions as w; w()",
    ]
    try:
        done = subprocess.run(
            command, input=origins, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"making tasks again took more than {TIMEOUT_S:.0f} s in a process of its own"
        ) from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise DataError(f"tasks cannot be made again in a process of its own: {last}") from error
    for (origin, entry), again in zip(made, json.loads(done.stdout.splitlines()[-1]), strict=True):
        if entry["question"] != again:
            raise ConfigError(
                f"generator {origin.generator!r} makes another task of item {origin.index} in each process, "
                "so its answers could not be scored; leave it out of --generators, or set the environment "
                "variable PYTHONHASHSEED=0 for this command and for every node of the run"
            )


def write_questions() -> None:
    """Read origins from stdin, as JSON; write their questions to stdout."""
    questions = [Generated(**origin).entry()["question"] for origin in json.load(sys.stdin)]
    sys.stdout.write(json.dumps(questions) + "\n")
