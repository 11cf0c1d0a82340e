"""Programs, judged by test cases that run in the sandbox."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import ClassVar

from agentrl.errors import ConfigError, DataError, RewardError, SandboxError
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.rewards import RunsIn
from agentrl.rewards.code_cases import Cases, equal_texts, extract_code, is_expected, read_cases
from agentrl.sandbox import Program, Sandbox, SandboxResult, open_sandbox, read_options
from agentrl.types import JsonObject, Task

CONFIG_KEY = "reward.reward_config.code"
OWN_KEYS = ("continuous", "max_cases", "total_s")
DEFAULT_LIMITS = {"cpu_s": 4.0, "wall_s": 8.0}
"""Per case. The clock has more than the processor: a busy machine must not fail a program that computes little."""


class Code(Reward):
    """1 when the answer's last code block passes all cases, else the share that it passes of the first `max_cases`.

    Further cases run only while none failed, and the first failure among them ends it. With `continuous: false` it is 1 or 0.
    Metrics: accuracy (all passed), passed (the share), num_cases (those that count in it), compiles (it is Python),
    timeouts (cases).
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
            raise ConfigError(f"{CONFIG_KEY}.total_s={self._total_s!r}: seconds above 0; keep it well below reward.timeout_s")
        self._options = read_options(config, key=CONFIG_KEY, others=OWN_KEYS)
        self.max_concurrent = open_sandbox(self._options).num_slots  # in line for the sandbox, no deadline passes

    def check(self, task: Task) -> None:
        try:
            read_cases(task.ground_truth)
        except ValueError as error:
            raise DataError(f"task {task.task_id}: reward {self.name!r}: reward_model.ground_truth: {error}") from error
        open_sandbox(self._options).check()

    async def score(self, attempt: Attempted) -> RewardResult:  # type: ignore[override]
        """Score; runs each case in the sandbox.

        Raises:
            RewardError: the sandbox broke, or the ground truth has no cases.
        """
        try:
            cases = read_cases(attempt.task.ground_truth)
        except ValueError as error:
            raise RewardError(f"reward {self.name!r}: ground truth: {error}") from error
        source = extract_code(attempt.answer)
        tally = Tally(sure=self._max_cases if self._is_continuous else 1)
        compiles = False
        if source is not None:
            judge = Judge(open_sandbox(self._options), source, total_s=self._total_s)
            try:
                if compiles := await judge.compiles():
                    await judge.run(cases, tally)
            except SandboxError as error:
                raise RewardError(f"reward {self.name!r}: {error}") from error
        return self._result(tally, len(cases), compiles=compiles)

    def _result(self, tally: Tally, num_cases: int, *, compiles: bool) -> RewardResult:
        is_right = tally.passed == num_cases
        counted = max(min(num_cases, self._max_cases), tally.passed + tally.failed)
        share = tally.passed / counted
        metrics = {"accuracy": float(is_right), "passed": share, "num_cases": counted, "compiles": compiles, "timeouts": tally.timeouts}
        value = share if self._is_continuous else float(is_right)
        return RewardResult(value, {name: float(number) for name, number in metrics.items()})


@dataclass
class Tally:
    """What came of the cases so far.

    sure: as many run whatever happens; then the first failure ends it. used_s: by the clock of the sandbox, waiting for a place
    in it not counted.
    """

    sure: int
    passed: int = 0
    failed: int = 0
    timeouts: int = 0
    used_s: float = 0.0

    def add(self, is_passed: bool) -> None:
        self.passed += is_passed
        self.failed += not is_passed

    @property
    def is_settled(self) -> bool:
        return self.failed > 0 and self.passed + self.failed >= self.sure


class Judge:
    """Runs one program against cases, one after the other; those that `total_s` does not reach are not passed."""

    def __init__(self, sandbox: Sandbox, source: str, *, total_s: float) -> None:
        self._sandbox = sandbox
        self._source = source
        self._file = source.encode("utf-8", "replace")
        self._total_s = total_s

    async def compiles(self) -> bool:
        """Tell whether the program is Python. Raises SandboxError."""
        # Not here: the compiler takes memory and stack in proportion to what it is given.
        result = await self._sandbox.run(Program(COMPILE, files={"program.py": self._file}))
        return result.is_ok

    async def run(self, cases: Cases, tally: Tally) -> None:
        """Raises SandboxError."""
        if cases.function is not None:
            await self._call_function(cases, tally)
            return
        for index in range(len(cases)):
            if self._is_over(tally):
                return
            tally.add(await (self._assert(cases.asserts[index], tally) if cases.asserts else self._pipe(cases, index, tally)))

    def _is_over(self, tally: Tally) -> bool:
        return tally.is_settled or tally.used_s >= self._total_s

    async def _run(self, program: Program, tally: Tally) -> SandboxResult:
        result = await self._sandbox.run(program)
        tally.used_s += result.wall_s
        tally.timeouts += result.is_timed_out
        return result

    async def _pipe(self, cases: Cases, index: int, tally: Tally) -> bool:
        result = await self._run(Program(self._source, stdin=cases.inputs[index]), tally)
        return result.is_ok and equal_texts(result.stdout, cases.outputs[index])

    async def _assert(self, text: str, tally: Tally) -> bool:
        # Reaching the end is the proof: a program may end itself before, with any exit code.
        proof = secrets.token_hex(16)
        result = await self._run(Program(f"{self._source}\n\n{text}\n\nprint({proof!r})\n"), tally)
        return result.is_ok and result.stdout.rstrip().endswith(proof)

    async def _call_function(self, cases: Cases, tally: Tally) -> None:
        """Call the function for all cases in one process; a case that ends it is failed, and the next ones get another."""
        first = 0
        while first < len(cases) and not self._is_over(tally):
            mark = secrets.token_hex(16)
            request = json.dumps({"mark": mark, "function": cases.function, "inputs": cases.inputs[first:]})
            result = await self._run(Program(HARNESS, stdin=request, files={"program.py": self._file}), tally)
            lines = [line.removeprefix(mark) for line in result.stdout.split("\n") if line.startswith(mark)]
            if not lines:  # it did not load: no case will do better
                tally.add(False)
                return
            replies = lines[1 : len(cases) - first + 1]
            for reply, expected in zip(replies, cases.outputs[first:], strict=False):
                if not tally.is_settled:
                    tally.add(is_expected(reply, expected))
            first += len(replies)
            if first < len(cases) and not tally.is_settled:
                tally.add(False)
                first += 1


COMPILE = 'compile(open("program.py", encoding="utf-8").read(), "program.py", "exec")'

HARNESS = """
import json, sys
request = json.load(sys.stdin)
sys.stdin = open("/dev/null")
space = {"__name__": "program"}
exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"), space)
name = request["function"]
function = getattr(space["Solution"](), name) if name not in space and "Solution" in space else space[name]
print("\\n" + request["mark"], flush=True)
for arguments in request["inputs"]:
    try:
        text = json.dumps({"value": function(*arguments)})
    except Exception as error:
        text = json.dumps({"error": type(error).__name__})
    print("\\n" + request["mark"] + text, flush=True)
"""
"""Runs in the sandbox. Expected values never come here: a program cannot return what it was not asked to compute."""
