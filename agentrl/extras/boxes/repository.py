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

from agentrl.errors import DataError
from agentrl.extras.boxes.box import BoxRefused, Start
from agentrl.extras.boxes.options import WorkspaceOptions
from agentrl.extras.boxes.proof import added_modules, patched_files, plain_files, proven, read_proof
from agentrl.extras.boxes.workspace import MIB, Workspace, written
from agentrl.types import JsonObject

Runner = Literal["unittest", "pytest"]
RUN_TESTS = (Path(__file__).parent / "inside" / "run_tests.py").read_text(encoding="utf-8")
FROM_ELSEWHERE = "import sys; sys.path.remove(''); exec(sys.argv.pop(1))"
"""A module of the repository that is named like one of the runner's must not take its place."""


class RepositoryOptions(WorkspaceOptions):
    """Options in `agent.environment_config.repository`."""

    tests_timeout_s: float = Field(
        25.0, gt=0, description="Deadline of all tests; keep it below reward.timeout_s."
    )


class Repository(Workspace):
    """A repository with a fault. The reward `tests_pass` asks at the end which tests pass.

    paths: files and folders of the row's repository. left: the repository as the model left it, with all that
    decides its tests as the row has it, a tar archive; None before the end, and if the model ended its box.
    """

    name: ClassVar[str] = "repository"
    options_class = RepositoryOptions
    options: RepositoryOptions
    paths: frozenset[str] = frozenset()
    left: bytes | None = None

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
        await super().start(files=files, archive=archive, image=image, **unknown)
        original = await self._box().snapshot(max_bytes=self._max_bytes)
        given = {*self._tests, *patched_files(test_patch)}
        patched = original if not test_patch else await self._patched(test_patch, original)
        names = (*self._fixed, *self._kept)
        self._proof = await trio.to_thread.run_sync(read_proof, patched, given, names)
        self.paths = frozenset(self._proof.known)

    async def facts(self) -> JsonObject:
        """Keep what the model left, in `left`."""
        try:
            changed = await self._box().snapshot(max_bytes=self._max_bytes)
            self.left = await trio.to_thread.run_sync(proven, changed, self._proof)
        except (BoxRefused, tarfile.TarError, KeyError):  # the model ended its box, or filled it
            self.left = None
        return await super().facts()

    async def passed(self) -> frozenset[str]:
        """Run the tests on what the model left, in a fresh box; return the names of those that pass.

        None do if the model ended its box, or its code ended the tests.
        """
        if self.left is None:
            return frozenset()
        token = secrets.token_hex(16)
        request = {
            "runner": self._runner,
            "tests": list(dict.fromkeys([*self._fixed, *self._kept])),
            "added": await trio.to_thread.run_sync(added_modules, self.left, self._proof),
            "token": token,
        }
        try:
            await self._open(Start(self.image, self.left, self._tests))
            done = await self._box().run(
                ["python3", "-c", FROM_ELSEWHERE, RUN_TESTS],
                stdin=json.dumps(request).encode(),
                timeout_s=self.options.tests_timeout_s,
                max_output_bytes=4 * MIB,
            )
        except BoxRefused:  # what the model left does not fit, or ended the box
            return frozenset()
        return _passed(done.stdout, token)

    def left_files(self) -> dict[str, bytes] | None:
        """Return `left` as files, path -> content, without links."""
        return None if self.left is None else plain_files(self.left)

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


def _passed(stdout: str, token: str) -> frozenset[str]:
    """Return the tests that passed by the verdicts behind the token; none without them."""
    for line in reversed(stdout.splitlines()):
        if line.startswith(token):
            found = json.loads(line.removeprefix(token))
            return frozenset(str(name) for name, verdict in found.items() if verdict is True)
    return frozenset()


def _names(given: Sequence[str] | str, key: str) -> tuple[str, ...]:
    try:
        names = json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise DataError(f"environment 'repository': {key} is no JSON list: {error}") from error
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise DataError(f"environment 'repository': {key} must be a list of names of tests")
    return tuple(names)
