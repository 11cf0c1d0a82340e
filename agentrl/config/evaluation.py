"""Sampling of validation."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.section import Section


class EvalConfig(Section):
    """Sampling of validation."""

    n: int = Field(1, ge=1, description="Attempts per validation row.")
    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(-1, description="-1: off.")
    min_p: float = Field(0.0, ge=0, le=1, description="0: off.")
    timeout_s: float = Field(1800.0, gt=0, description="Deadline of one whole validation.")
