"""The reward of a changed repository: do its tests pass?"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import Options, read_options
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject


class TestsPassOptions(Options):
    """Options in `reward.reward_config.tests_pass`."""

    partial: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Reward of a change that keeps all tests and mends some: this share of them.",
    )


class TestsPass(Reward):
    """1 if all tests of the row pass, by the facts of the environment `repository`; else 0, or a part of it.

    Metrics: resolved, fail_to_pass and pass_to_pass (shares).
    """

    name: ClassVar[str] = "tests_pass"
    runs_in: RunsIn = "inline"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(TestsPassOptions, self.config, plugin=f"reward {self.name!r}")

    def score(self, attempt: Attempted) -> RewardResult | None:
        """Return the reward, or None if the attempt had no repository."""
        facts = attempt.facts
        if "fail_to_pass" not in facts or "pass_to_pass" not in facts:
            return None
        fixed, kept = _share(*facts["fail_to_pass"]), _share(*facts["pass_to_pass"])
        return repository_result(fixed, kept, partial=self._options.partial)


def repository_result(fixed: float, kept: float, *, partial: float) -> RewardResult:
    """Return the reward of a change by the shares of its tests that pass, both in [0, 1]."""
    is_resolved = fixed == kept == 1.0
    value = 1.0 if is_resolved else partial * fixed * (kept == 1.0)
    return RewardResult(value, {"resolved": float(is_resolved), "fail_to_pass": fixed, "pass_to_pass": kept})


def _share(num_passed: int, number: int) -> float:
    return num_passed / number if number else 1.0
