"""Reward for programs: test cases that run in the sandbox."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from agentrl.errors import ConfigError, DataError, RewardError, SandboxError
from agentrl.extras.sandbox import open_sandbox, read_options
from agentrl.extras.sandbox.code_cases import Cases, extract_code, read_cases
from agentrl.extras.sandbox.code_judge import CaseTally, Judge
from agentrl.extras.sandbox.code_tests import join_setups, read_tests
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject, Task

CONFIG_KEY = "reward.reward_config.code"
OWN_KEYS = ("continuous", "max_cases", "total_s")
DEFAULT_LIMITS = {"cpu_s": 4.0, "wall_s": 8.0}
"""Per case. Wall time exceeds CPU time: a busy machine must not fail a program that computes little."""


class Code(Reward):
    """1 if the answer's program (`extract_code`) passes all cases, else the share that it passes of the first
    `max_cases`.

    Later cases run only while none has failed; the first failure among them ends the run. With `continuous:
    false` the reward is 1 or 0.
    Metrics: accuracy (all passed), passed (the share), num_cases (those in the share), compiles (it is valid
    Python), timeouts (number of cases).
    """

    name: ClassVar[str] = "code"
    runs_in: RunsIn = "trio"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        config = {**DEFAULT_LIMITS, **self.config}
        self._is_continuous = config.get("continuous", True)
        if not isinstance(self._is_continuous, bool):
            raise ConfigError(f"{CONFIG_KEY}.continuous={self._is_continuous!r}: true or false")
        self._max_cases = config.get("max_cases", 10)
        if not isinstance(self._max_cases, int) or self._max_cases < 1:
            raise ConfigError(f"{CONFIG_KEY}.max_cases={self._max_cases!r}: a whole number above 0")
        self._total_s = config.get("total_s", 20.0)
        if not isinstance(self._total_s, (int, float)) or not self._total_s > 0:
            raise ConfigError(
                f"{CONFIG_KEY}.total_s={self._total_s!r}: seconds above 0; keep it well below "
                "reward.timeout_s"
            )
        self._options = read_options(config, key=CONFIG_KEY, others=OWN_KEYS)
        self.max_concurrent = open_sandbox(
            self._options
        ).num_slots  # so the deadline starts only once a slot is free

    def check(self, task: Task) -> None:
        try:
            _read(task)
        except ValueError as error:
            raise DataError(
                f"task {task.task_id}: reward {self.name!r}: reward_model.ground_truth: {error}"
            ) from error
        open_sandbox(self._options).check()

    async def score(self, attempt: Attempted) -> RewardResult:  # type: ignore[override]
        """Run the cases in the sandbox and score them.

        Raises:
            RewardError: the sandbox broke, or the ground truth has no cases.
        """
        try:
            cases = _read(attempt.task)
        except ValueError as error:
            raise RewardError(f"reward {self.name!r}: ground truth: {error}") from error
        source = extract_code(attempt.answer)
        tally = CaseTally(sure=self._max_cases if self._is_continuous else 1)
        if source is not None:
            judge = Judge(open_sandbox(self._options), source, total_s=self._total_s)
            try:
                await judge.run(cases, tally)
            except SandboxError as error:
                raise RewardError(f"reward {self.name!r}: {error}") from error
        return self._result(tally, len(cases))

    def _result(self, tally: CaseTally, num_cases: int) -> RewardResult:
        is_right = tally.passed == num_cases
        counted = max(min(num_cases, self._max_cases), tally.passed + tally.failed)
        share = tally.passed / counted
        compiles = tally.compiles is True
        metrics = {
            "accuracy": float(is_right),
            "passed": share,
            "num_cases": counted,
            "compiles": compiles,
            "timeouts": tally.timeouts,
        }
        value = share if self._is_continuous else float(is_right)
        return RewardResult(value, {name: float(number) for name, number in metrics.items()})


def _read(task: Task) -> Cases:
    """Read the cases and check the tests among them. Raises ValueError."""
    cases = read_cases(task.ground_truth)
    if cases.asserts:
        cases = dataclasses.replace(cases, asserts=join_setups(cases.asserts))
        read_tests(cases.asserts)
    return cases
