"""Where ranks stand: what each of them asks Ray for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Seat:
    """What one rank asks Ray for. num_gpus: below 1 it shares its GPU with ranks of other roles."""

    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)

    def ray_options(self) -> dict[str, Any]:
        return {"num_cpus": 0, "num_gpus": self.num_gpus, "resources": dict(self.resources) or None}
