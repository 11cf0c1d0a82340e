"""The reward of a changed repository whose tests never share a process with the code that they test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentrl.errors import ConfigError, DataError, RewardError, SandboxError
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.rewards import RunsIn
from agentrl.rewards.apart import FOLDER, ApartTests, read_apart, top_level
from agentrl.rewards.code import DEFAULT_LIMITS
from agentrl.rewards.code_judge import CaseTally, Judge
from agentrl.rewards.tests_pass import TestsPassOptions, repository_result
from agentrl.sandbox import open_sandbox, read_options
from agentrl.types import JsonObject, Task

CONFIG_KEY = "reward.reward_config.tests_apart"
OWN_KEYS = ("partial", "total_s")
MIB = 2**20


@dataclass
class EachTest(CaseTally):
    """results: of each test, in order."""

    results: list[bool] = field(default_factory=list)

    def add(self, is_passed: bool) -> None:
        super().add(is_passed)
        self.results.append(is_passed)


class TestsApart(Reward):
    """As `tests_pass`, for environments `repository` with `apart: true`.

    The tests run in a sandboxed process that has proxies of the repository's objects; the repository's code
    runs in another one. Neither the tests nor their verdicts are in its reach.
    """

    name: ClassVar[str] = "tests_apart"
    runs_in: RunsIn = "trio"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        config = {**DEFAULT_LIMITS, **self.config}
        self._partial = TestsPassOptions(partial=config.get("partial", 0.0)).partial
        self._total_s = config.get("total_s", 20.0)
        if not isinstance(self._total_s, (int, float)) or not self._total_s > 0:
            raise ConfigError(
                f"{CONFIG_KEY}.total_s={self._total_s!r}: seconds above 0; keep it well below "
                "reward.timeout_s"
            )
        self._options = read_options(config, key=CONFIG_KEY, others=OWN_KEYS)
        self.max_concurrent = open_sandbox(self._options).num_slots

    def check(self, task: Task) -> None:
        """Raise DataError if the row's tests cannot run apart."""
        row = task.environment_kwargs or {}
        if row.get("name") == "repository":
            try:
                _read(row, top_level(row.get("files") or {}))
            except ValueError as error:
                raise DataError(f"task {task.task_id}: reward {self.name!r}: {error}") from error
            open_sandbox(self._options).check()

    async def score(self, attempt: Attempted) -> RewardResult | None:  # type: ignore[override]
        """Run the tests, or return None if the attempt had no repository.

        Raises:
            RewardError: the sandbox broke, or a test cannot run with any code.
        """
        environment = attempt.environment
        if not hasattr(environment, "left_files"):
            return None
        if not environment.options.apart:
            raise RewardError("set agent.environment_config.repository.apart: true, or use tests_pass")
        row = attempt.task.environment_kwargs or {}
        try:
            files = _read(row, environment.modules)
            passed = await self._passed(files, environment.left_files)
        except (ValueError, SandboxError) as error:
            raise RewardError(str(error)) from error
        fixed, kept = (_share(_names(row.get(key, ())), passed) for key in ("fail_to_pass", "pass_to_pass"))
        return repository_result(fixed, kept, partial=self._partial)

    async def _passed(self, files: Sequence[ApartTests], left: Mapping[str, bytes] | None) -> set[str]:
        if left is None or not self._has_room(left):
            return set()
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


def _read(row: Mapping[str, Any], modules: frozenset[str]) -> tuple[ApartTests, ...]:
    """Prepare the tests of a row. Raises ValueError."""
    if row.get("test_patch"):
        raise ValueError("tests that come as test_patch cannot run apart; give them as `tests`")
    names = [*_names(row.get("fail_to_pass", ())), *_names(row.get("pass_to_pass", ()))]
    return read_apart(names, row.get("tests") or {}, modules)


def _names(given: Sequence[str] | str) -> Sequence[str]:
    return json.loads(given) if isinstance(given, str) else given


def _share(names: Sequence[str], passed: set[str]) -> float:
    return sum(name in passed for name in names) / len(names) if names else 1.0
