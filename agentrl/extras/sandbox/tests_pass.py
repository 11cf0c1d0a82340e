"""The reward of a changed repository: do its tests pass?"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentrl.errors import ConfigError, DataError, RewardError, SandboxError
from agentrl.extras.sandbox import open_sandbox, read_options
from agentrl.extras.sandbox.apart import FOLDER, ApartTests, read_apart
from agentrl.extras.sandbox.code_judge import CaseTally, Judge
from agentrl.extras.sandbox.code_reward import DEFAULT_LIMITS
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject, Task

CONFIG_KEY = "reward.reward_config.tests_pass"
OWN_KEYS = ("apart", "partial", "total_s")
MIB = 2**20


@dataclass
class EachTest(CaseTally):
    """results: of each test, in order."""

    results: list[bool] = field(default_factory=list)

    def add(self, is_passed: bool) -> None:
        super().add(is_passed)
        self.results.append(is_passed)


class TestsPass(Reward):
    """1 if all tests of a row of the environment `repository` pass; else 0, or a part of it.

    Where a row allows it, the tests run apart: in a sandboxed process that has proxies of the repository's
    objects, while the repository's code runs in another one. Neither the tests nor their verdicts are in its
    reach. Other tests run beside the code, in a fresh box.

    Metrics: resolved, fail_to_pass and pass_to_pass (shares), apart (1 if the tests ran apart).
    """

    name: ClassVar[str] = "tests_pass"
    runs_in: RunsIn = "trio"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        config = {**DEFAULT_LIMITS, **self.config}
        self._apart = config.get("apart")
        if self._apart is not None and not isinstance(self._apart, bool):
            raise ConfigError(
                f"{CONFIG_KEY}.apart={self._apart!r}: use true, false, or null (where a row allows it)"
            )
        self._partial = _number(config, "partial", 0.0, at_least=0.0, below=1.0)
        self._total_s = _number(config, "total_s", 20.0, at_least=0.1)
        self._options = read_options(config, key=CONFIG_KEY, others=OWN_KEYS)
        self.max_concurrent = open_sandbox(self._options).num_slots

    def check(self, task: Task) -> None:
        """Raise DataError if the row's tests must run apart and cannot.

        Raises:
            SandboxError: they can, and there is no sandbox for them.
        """
        row = task.environment_kwargs or {}
        if row.get("name") != "repository" or self._apart is False:
            return
        try:
            _read(row)
        except ValueError as error:
            if self._apart is True:
                raise DataError(f"task {task.task_id}: reward {self.name!r}: {error}") from error
            return
        open_sandbox(self._options).check()

    async def score(self, attempt: Attempted) -> RewardResult | None:  # type: ignore[override]
        """Run the tests, or return None if the attempt had no repository.

        Raises:
            RewardError: the sandbox broke, or a test cannot run with any code.
        """
        environment, row = attempt.environment, attempt.task.environment_kwargs or {}
        if not hasattr(environment, "left_files"):
            return None
        try:
            tests = self._tests_apart(environment, row)
            passed = (
                await environment.passed()
                if tests is None
                else await self._passed(tests, environment.left_files())
            )
        except (ValueError, SandboxError) as error:
            raise RewardError(str(error)) from error
        fixed, kept = (_share(_names(row.get(key, ())), passed) for key in ("fail_to_pass", "pass_to_pass"))
        is_resolved = fixed == kept == 1.0
        return RewardResult(
            1.0 if is_resolved else self._partial * fixed * (kept == 1.0),
            {
                "resolved": float(is_resolved),
                "fail_to_pass": fixed,
                "pass_to_pass": kept,
                "apart": float(tests is not None),
            },
        )

    def _tests_apart(self, environment: Any, row: Mapping[str, Any]) -> Sequence[ApartTests] | None:
        """Return the tests to run apart; None if they run beside the code. Raises ValueError."""
        if self._apart is False or (self._apart is None and (environment.image or environment.options.image)):
            return None
        try:
            return _read(row, environment.paths)
        except ValueError:
            if self._apart is True:
                raise
            return None

    async def _passed(self, files: Sequence[ApartTests], left: Mapping[str, bytes] | None) -> Collection[str]:
        if left is None or not self._has_room(left):
            return ()
        beside = {f"{FOLDER}/{path}": content for path, content in left.items()}
        passed: set[str] = set()
        for tests in files:
            tally = EachTest(sure=len(tests.names))
            judge = Judge(open_sandbox(self._options), tests.program, total_s=self._total_s, files=beside)
            await judge.run_suite(tests.suite, tally)
            passed |= {name for name, is_passed in zip(tests.names, tally.results, strict=False) if is_passed}
        return passed

    def _has_room(self, left: Mapping[str, bytes]) -> bool:
        limits = self._options.limits
        return len(left) < limits.max_files // 2 and sum(map(len, left.values())) < limits.disk_mib * MIB // 2


def _read(row: Mapping[str, Any], paths: Collection[str] = ()) -> Sequence[ApartTests]:
    """Prepare the tests of a row. Raises ValueError if they cannot run apart."""
    if row.get("test_patch"):
        raise ValueError("tests that come as test_patch cannot run apart; give them as `tests`")
    names = [*_names(row.get("fail_to_pass", ())), *_names(row.get("pass_to_pass", ()))]
    return read_apart(names, row.get("tests") or {}, {*(row.get("files") or {}), *paths})


def _number(
    config: Mapping[str, Any], key: str, default: float, *, at_least: float, below: float = 1e9
) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not at_least <= value < below:
        raise ConfigError(f"{CONFIG_KEY}.{key}={value!r}: a number from {at_least:g} to below {below:g}")
    return float(value)


def _names(given: Sequence[str] | str) -> Sequence[str]:
    return json.loads(given) if isinstance(given, str) else given


def _share(names: Sequence[str], passed: Collection[str]) -> float:
    return sum(name in passed for name in names) / len(names) if names else 1.0
