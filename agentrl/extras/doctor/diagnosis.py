"""`Diagnosis`: one line of the report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

Verdict = Literal["ok", "slow", "wrong"]
"""ok: as it should be. slow: works, but costs time or may fail later. wrong: a run would fail."""
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found about one part of the machine.

    part: a word or two, the same on every machine.
    cure: what to do; "" if nothing is to be done.
    figures: what was measured, name with unit -> number.
    node: address of the node of a cluster; "": this machine, or all nodes together.
    """

    part: str
    verdict: Verdict
    text: str
    cure: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    node: str = ""

    def as_json(self) -> str:
        """Return the diagnosis as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Diagnosis:
        """Return the diagnosis of a line of `as_json`."""
        return cls(**json.loads(line))
