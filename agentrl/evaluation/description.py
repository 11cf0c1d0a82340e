"""The description of a run that is stored with its results: enough to repeat the run, without secrets."""

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
    """One data set of the run.

    `template`: name@version of the prompt template, or `none` for the rows' own prompts.
    """

    name: str
    num_problems: int
    template: str


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Description of a run.

    Attributes:
        model: folder, hub id or URL.
        servers: the servers that were used, in words.
        sampling: the `eval` section as plain data, including n.
        config: the whole resolved config.
        started: ISO 8601 with time zone.
        seconds: duration of this process, which may have resumed another.
        version, commit: of this package; commit is None outside of a checkout.
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
        """Return the description as JSON values.

        Values under secret-looking names, and users in URLs, are replaced by `***`.
        """
        return redact(
            {
                "model": self.model,
                "servers": self.servers,
                "data_sets": [
                    {"name": d.name, "num_problems": d.num_problems, "template": d.template}
                    for d in self.data_sets
                ],
                "sampling": dict(self.sampling),
                "started": self.started,
                "seconds": self.seconds,
                "agentrl": {"version": self.version, "commit": self.commit},
                "config": dict(self.config),
            }
        )


def package_commit() -> str | None:
    """Return the git commit of this package, with `+` if files are modified; None outside of a checkout."""
    root = Path(agentrl.__file__).parents[1]
    if not (root / ".git").exists():  # a parent folder may be an unrelated repository
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + "+" * bool(
            _git(root, "status", "--porcelain", "--untracked-files=no", "--", "agentrl")
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=GIT_TIMEOUT_S,
    )
    return done.stdout.strip()
