"""Runs one program against its test cases.

The program is in the sandbox; comparisons happen outside its process.

Calls with expected values run in one process, which returns plain data; the values are compared here. All
other tests run in a process of their own. It talks to the program's process by pipes, and never holds one of
its objects.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import marshal
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import RewardError
from agentrl.extras.sandbox import Limits, Program, Sandbox, SandboxResult
from agentrl.extras.sandbox.code_cases import Cases, equal_texts, is_expected
from agentrl.extras.sandbox.code_tests import FunctionCall, Suite, read_tests
from agentrl.extras.sandbox.inside import plain_data

INSIDE = "agentrl_inside"
COMPILE = 'compile(open("program.py", encoding="utf-8").read(), "program.py", "exec")'
RUN = f'from {INSIDE}.contest_imports import run\nrun("program.py")'
CHECK = f"from {INSIDE}.checker import main\nmain()"
JUDGE_S = 2.0
"""Additional seconds for the test's side, after the program's."""
CLOCKS = (signal.SIGPROF, signal.SIGALRM)


@dataclass
class CaseTally:
    """Results of the cases so far.

    sure: number of cases that always run; after them the first failure ends the run.
    used_s: wall time in the sandbox, without waiting for a slot.
    compiles: whether the program is valid Python; None before that is known.
    """

    sure: int
    passed: int = 0
    failed: int = 0
    timeouts: int = 0
    used_s: float = 0.0
    compiles: bool | None = None

    def add(self, is_passed: bool) -> None:
        self.passed += is_passed
        self.failed += not is_passed

    @property
    def is_settled(self) -> bool:
        return self.failed > 0 and self.passed + self.failed >= self.sure


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Report of one process: whether the program compiles and loads, and results of the cases until it
    ended.
    """

    compiles: bool = False
    is_loaded: bool = False
    passed: tuple[bool, ...] = ()


class Judge:
    """Runs one program against cases. Cases that are not reached within `total_s` fail."""

    def __init__(
        self, sandbox: Sandbox, source: str, *, total_s: float, files: Mapping[str, bytes] | None = None
    ) -> None:
        """files: path -> content, beside the program."""
        self._sandbox = sandbox
        self._beside = dict(files or {})
        self._source = source
        self._file = source.encode("utf-8", "replace")
        self._total_s = total_s

    async def run(self, cases: Cases, tally: CaseTally) -> None:
        """Run the cases and add their results to `tally`.

        Raises:
            SandboxError: the sandbox broke.
            RewardError: a test cannot be run with any program.
        """
        if cases.function is not None:
            calls = [
                FunctionCall(cases.function, tuple(args), {}, expected)
                for args, expected in zip(cases.inputs, cases.outputs, strict=True)
            ]
            await self._serve(
                len(calls), functools.partial(self._make_calls, calls, _is_stated(cases), tally), tally
            )
        elif cases.asserts:
            tests = read_tests(cases.asserts)
            if isinstance(tests, Suite):
                await self.run_suite(tests, tally)
            else:
                await self._serve(
                    len(tests), functools.partial(self._make_calls, list(tests), _is_equal, tally), tally
                )
        else:
            await self._pipe(cases, tally)

    async def run_suite(self, suite: Suite, tally: CaseTally) -> None:
        """Run the cases of a suite and add their results to `tally`, in order. Raises as `run`."""
        await self._serve(len(suite.cases), functools.partial(self._check, suite, tally), tally)

    def _is_over(self, tally: CaseTally) -> bool:
        return tally.is_settled or tally.used_s >= self._total_s

    def _limits(self, num_cases: int, tally: CaseTally, *, output_bytes: int = 0) -> Limits:
        """Return the limits of a process that runs so many cases. Inside, each case has limits of its own."""
        own = self._sandbox.options.limits
        left = max(self._total_s - tally.used_s, 0.1)
        times = num_cases + 1  # one for loading
        output_kib = max(own.output_kib, 2 * output_bytes // 1024 + own.output_kib)
        cpu_s, wall_s = (max(limit, min(limit * times, left)) for limit in (own.cpu_s, own.wall_s))
        return dataclasses.replace(own, cpu_s=cpu_s, wall_s=wall_s, output_kib=output_kib)

    # --------------------------------------------------------------------------------------- stdin and stdout

    async def _pipe(self, cases: Cases, tally: CaseTally) -> None:
        for given, wanted in zip(cases.inputs, cases.outputs, strict=True):
            if self._is_over(tally):
                return
            own = self._sandbox.options.limits
            limits = dataclasses.replace(own, output_kib=own.output_kib + 2 * len(wanted) // 1024)
            files = {**_inside("contest_imports"), "program.py": self._file}
            result = await self._sandbox.run(Program(RUN, stdin=given, files=files, limits=limits))
            self._note(result, tally)
            is_passed = result.is_ok and equal_texts(result.stdout, wanted, cases.tolerance)
            tally.add(is_passed)
            if tally.compiles is None:
                tally.compiles = is_passed or await self._compiles()
                if not tally.compiles:
                    return

    async def _compiles(self) -> bool:
        # Compiled in the sandbox: the compiler's memory and stack grow with the source.
        return (await self._sandbox.run(Program(COMPILE, files={"program.py": self._file}))).is_ok

    def _note(self, result: SandboxResult | None, tally: CaseTally) -> None:
        if result is not None:
            tally.used_s += result.wall_s
            tally.timeouts += result.is_timed_out or result.signal in CLOCKS

    # ------------------------------------------------------------------------------------ functions and tests

    async def _serve(
        self, num_cases: int, run: Callable[[int], Awaitable[Verdicts]], tally: CaseTally
    ) -> None:
        """Run the cases in one process.

        A case that ends the process fails, and the next ones get a new process.
        """
        first = 0
        while first < num_cases and not self._is_over(tally):
            verdicts = await run(first)
            tally.compiles = verdicts.compiles
            if not verdicts.is_loaded:  # no case can pass
                tally.add(False)
                return
            for is_passed in verdicts.passed:
                if not tally.is_settled:
                    tally.add(is_passed)
            first += len(verdicts.passed)
            if first < num_cases and not tally.is_settled:
                tally.add(False)
                first += 1

    def _program(self, reads: int, writes: int, limits: Limits, stdin: bytes = b"") -> Program:
        own = self._sandbox.options.limits
        clocks = f"cpu_s={own.cpu_s!r}, wall_s={own.wall_s!r}"
        start = f"from {INSIDE}.program import main\nmain({reads}, {writes}, is_heard={reads > 0}, {clocks})"
        return Program(
            start,
            stdin=stdin,
            files={
                **self._beside,
                **_inside("plain_data", "contest_imports", "program"),
                "program.py": self._file,
            },
            limits=limits,
        )

    async def _make_calls(
        self, calls: list[FunctionCall], is_right: Callable[[Any, Any], bool], tally: CaseTally, first: int
    ) -> Verdicts:
        rest = calls[first:]
        asked = b"".join(_question(call) for call in rest)
        limits = self._limits(len(rest), tally, output_bytes=sum(len(repr(call.expected)) for call in rest))
        result = await self._sandbox.run(self._program(0, 1, limits, asked))
        self._note(result, tally)
        compiled, loaded, *answers = [*result.stdout.encode().split(b"\n")[:-1], b"", b""]
        passed = tuple(
            _is_right(answer, call.expected, is_right)
            for answer, call in zip(answers[:-2], rest, strict=False)
        )
        return Verdicts(_says(compiled, "compiles"), _says(loaded, "loaded"), passed)

    async def _check(self, suite: Suite, tally: CaseTally, first: int) -> Verdicts:
        rest = dataclasses.replace(suite, cases=suite.cases[first:])
        limits = self._limits(len(rest.cases), tally)
        judge = Program(
            CHECK,
            stdin=json.dumps(dataclasses.asdict(rest)),
            files=_inside("plain_data", "objects", "checker"),
            limits=dataclasses.replace(limits, wall_s=limits.wall_s + JUDGE_S),
        )
        ended, judged = await self._sandbox.run_pair(self._program(3, 4, limits), judge)
        self._note(ended, tally)
        if ended is None:
            self._note(judged, tally)
        lines = judged.stdout.splitlines()
        for line in lines:
            if line.startswith("broken "):
                raise RewardError(f"reward 'code': {line.removeprefix('broken ')}")
        passed = tuple(line == "passed" for line in lines if line in ("passed", "failed"))
        return Verdicts("compiles" in lines, "loaded" in lines, passed)


@functools.cache
def _inside(*names: str) -> dict[str, bytes]:
    """Return files of the package `inside`, compiled: the sandbox has the same interpreter."""
    files = {}
    for name in ("__init__", *names):
        path = Path(__file__).parent / "inside" / f"{name}.py"
        code = compile(path.read_text(encoding="utf-8"), path.name, "exec", dont_inherit=True)
        files[f"{INSIDE}/{name}.pyc"] = importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
    return files


def _question(call: FunctionCall) -> bytes:
    args, kwargs = plain_data.encode(list(call.args), _no_object), plain_data.encode(call.kwargs, _no_object)
    return plain_data.dump({"op": "entry", "function": call.function, "args": args, "kwargs": kwargs})


def _no_object(value: Any) -> Any:
    raise TypeError(f"{value!r} is not plain data")


def _says(line: bytes, word: str) -> bool:
    try:
        answer = plain_data.load(line)
    except plain_data.UNREADABLE:
        return False
    return isinstance(answer, dict) and answer.get(word) is True


def _is_right(line: bytes, expected: Any, compare: Callable[[Any, Any], bool]) -> bool:
    """Return whether an answer has the expected value.

    Unreadable answers are wrong: the program wrote them.
    """
    try:
        answer = plain_data.load(line)
        return (
            isinstance(answer, dict)
            and "value" in answer
            and compare(plain_data.decode(answer["value"]), expected)
        )
    except plain_data.UNREADABLE:
        return False


def _is_stated(cases: Cases) -> Callable[[Any, Any], bool]:
    return lambda returned, expected: is_expected(returned, expected, cases.tolerance)


def _is_equal(returned: Any, expected: Any) -> bool:
    """Compare as the assertion would. Both values are of builtin types."""
    return bool(returned == expected)
