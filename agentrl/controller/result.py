"""`RunResult`: what a training run returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.types import BufferCounts


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a training run.

    model_path: folder of the exported policy. counts: groups by state.
    validation: name of a policy (a baseline, `initial`, `final`) -> its validation metrics.
    """

    run_dir: Path
    model_path: Path
    step: int
    version: int
    counts: BufferCounts
    validation: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
