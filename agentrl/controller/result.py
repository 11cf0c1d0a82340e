"""What a training run returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.types import BufferCounts


@dataclass(frozen=True, slots=True)
class RunResult:
    """`validation` maps a policy's name (a baseline, `initial`, `final`) to its validation metrics; `counts` balance."""

    run_dir: Path
    model_path: Path
    step: int
    version: int
    counts: BufferCounts
    validation: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
