"""The environment `repository`: a workspace with a repository, whose tests judge what the model changed."""

from __future__ import annotations

import json
import secrets
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import trio
from pydantic import Field

from agentrl.boxes.box import BoxRefused, Start
from agentrl.boxes.options import WorkspaceOptions
from agentrl.boxes.proof import modules_of, patched_files, plain_files, protected, proven
from agentrl.boxes.workspace import MIB, Workspace, written
from agentrl.errors import DataError
from agentrl.types import JsonObject

Runner = Literal["unittest", "pytest"]
RUN_TESTS = (Path(__file__).parent / "inside" / "run_tests.py").read_text(encoding="utf-8")
FROM_ELSEWHERE = "import sys; sys.path.remove(''); exec(sys.argv.pop(1))"
"""A module of the repository that is named like one of the runner's must not take its place."""


class RepositoryOptions(WorkspaceOptions):
    """Options in `agent.environment_config.repository`."""

    tests_timeout_s: float = Field(
        40.0, gt=0, description="Deadline of all tests; keep it below agent.environment_timeout_s."
    )
    apart: bool = Field(
        False,
        description="Run no tests here: the reward tests_apart runs them, in a process without the code.",
    )


class Repository(Workspace):
    """A repository with a fault. At the end its tests run in a fresh box, where the tests' files are put back
    from the row; the facts say which passed.
    """

    name: ClassVar[str] = "repository"
    options_class = RepositoryOptions
    options: RepositoryOptions

    async def start(
        self,
        *,
        files: Mapping[str, str] | None = None,
        archive: str | None = None,
        image: str | None = None,
        fail_to_pass: Sequence[str] | str = (),
        pass_to_pass: Sequence[str] | str = (),
        tests: Mapping[str, str] | None = None,
        test_patch: str = "",
        runner: Runner = "unittest",
        **unknown: Any,
    ) -> None:
        """Open the box with the repository.

        Args:
            files, archive, image: as for a workspace.
            fail_to_pass, pass_to_pass: names of tests, as lists or as their JSON: those that the change must
                make pass, and those that must still pass.
            tests: test files, path -> text, that the model does not see before it is done.
            test_patch: the same as a unified diff (SWE-bench).
            runner: what knows the tests' names.
        """
        self._runner = runner
        self._fixed, self._kept = _names(fail_to_pass, "fail_to_pass"), _names(pass_to_pass, "pass_to_pass")
        if not self._fixed:
            raise DataError(f"environment {self.name!r}: fail_to_pass is empty: nothing tells a right change")
        if runner not in ("unittest", "pytest"):
            raise DataError(f"environment {self.name!r}: runner={runner!r}; use unittest or pytest")
        self._tests = written(tests or {}, "tests")
        self._proofs = {*self._tests, *patched_files(test_patch)}
        await super().start(files=files, archive=archive, image=image, **unknown)
        original = await self._box().snapshot(max_bytes=self._max_bytes)
        proof = original if not test_patch else await self._patched(test_patch, original)
        self._proof = await trio.to_thread.run_sync(protected, proof, self._proofs)
        self.modules = modules_of(original)
        self.left_files: Mapping[str, bytes] | None = None

    async def facts(self) -> JsonObject:
        """Return `resolved`, and how many tests of both kinds pass. The model's box is over then.

        With `apart`, keep the files for the reward instead: `left_files`, None if the box is over.
        """
        if self.options.apart:
            self.left_files = await self._left()
            return {"num_commands": self.num_commands}
        passed = await self._judge()
        fixed = sum(passed.get(name, False) for name in self._fixed)
        kept = sum(passed.get(name, False) for name in self._kept)
        return {
            "resolved": fixed == len(self._fixed) and kept == len(self._kept),
            "fail_to_pass": [fixed, len(self._fixed)],
            "pass_to_pass": [kept, len(self._kept)],
            "num_commands": self.num_commands,
        }

    async def _left(self) -> Mapping[str, bytes] | None:
        try:
            changed = await self._box().snapshot(max_bytes=self._max_bytes)
            state = await trio.to_thread.run_sync(proven, changed, self._proof, self._proofs)
            return await trio.to_thread.run_sync(plain_files, state)
        except (BoxRefused, tarfile.TarError):  # the model ended its box, or filled it
            return None

    async def _judge(self) -> dict[str, bool]:
        """Run the tests; return which passed. None do if the model's box is over or its tests end early."""
        try:
            changed = await self._box().snapshot(max_bytes=self._max_bytes)
            state = await trio.to_thread.run_sync(proven, changed, self._proof, self._proofs)
            await self._open(Start(self.image, state, self._tests))
        except (BoxRefused, tarfile.TarError):  # the model ended its box, or filled it
            return {}
        token = secrets.token_hex(16)
        tests = list(dict.fromkeys([*self._fixed, *self._kept]))
        try:
            done = await self._box().run(
                ["python3", "-c", FROM_ELSEWHERE, RUN_TESTS],
                stdin=json.dumps({"runner": self._runner, "tests": tests, "token": token}).encode(),
                timeout_s=self.options.tests_timeout_s,
                max_output_bytes=4 * MIB,
            )
        except BoxRefused:  # the tests of the model's code ended the box
            return {}
        return _passed(done.stdout, token)

    async def _patched(self, patch: str, original: bytes) -> bytes:
        """Return the original folder with the tests of a patch, and open the box again without them.

        The patch is applied before the model can change what it is applied to.
        """
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        done = await self._box().run(
            command, stdin=patch.encode(), timeout_s=self.options.tests_timeout_s, max_output_bytes=4096
        )
        if done.exit_code != 0:
            raise DataError(
                f"environment {self.name!r}: test_patch does not apply: {done.stderr.strip()[:300]}"
            )
        patched = await self._box().snapshot(max_bytes=self._max_bytes)
        await self.open(Start(self.image, original))
        return patched


def _passed(stdout: str, token: str) -> dict[str, bool]:
    """Return the verdicts behind the token; none if the tests ended their process before."""
    for line in reversed(stdout.splitlines()):
        if line.startswith(token):
            found = json.loads(line.removeprefix(token))
            return {str(name): verdict is True for name, verdict in found.items()}
    return {}


def _names(given: Sequence[str] | str, key: str) -> tuple[str, ...]:
    try:
        names = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise DataError(f"environment 'repository': {key} is no JSON list: {error}") from error
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise DataError(f"environment 'repository': {key} must be a list of names of tests")
    return tuple(names)
