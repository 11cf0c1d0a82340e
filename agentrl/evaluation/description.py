"""What was run, as it is stored beside its results: enough to run it again, and no secret."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agentrl
from agentrl.tracking.redact import redact

GIT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class DataSetLine:
    """One data set of the run. template: name@version of what was put around the questions, `none` for the rows' own prompts."""

    name: str
    num_problems: int
    template: str


@dataclass(frozen=True, slots=True)
class RunDescription:
    """What was run.

    model: folder, hub id or URL; servers: what it was asked on, in words. sampling: the settings of `eval`, in plain data, among them
    n; config: the whole config that was resolved. started: ISO 8601 with time zone; seconds: of this process, which may have resumed
    another. version, commit: of this package, commit None outside of a checkout.
    """

    model: str
    servers: str
    data_sets: tuple[DataSetLine, ...]
    sampling: Mapping[str, Any]
    config: Mapping[str, Any]
    started: str
    seconds: float
    version: str = agentrl.__version__
    commit: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values; what is named like a secret, and users in URLs, are `***`."""
        return redact(
            {
                "model": self.model,
                "servers": self.servers,
                "data_sets": [{"name": d.name, "num_problems": d.num_problems, "template": d.template} for d in self.data_sets],
                "sampling": dict(self.sampling),
                "started": self.started,
                "seconds": self.seconds,
                "agentrl": {"version": self.version, "commit": self.commit},
                "config": dict(self.config),
            }
        )


def package_commit() -> str | None:
    """Return the git commit that this package is run from, with `+` where files differ from it; None outside of a checkout."""
    root = Path(agentrl.__file__).parents[1]
    if not (root / ".git").exists():  # a folder above may be somebody else's repository
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + "+" * bool(_git(root, "status", "--porcelain", "--untracked-files=no", "--", "agentrl"))
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    return done.stdout.strip()
