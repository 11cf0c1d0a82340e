"""The environment `terminal`: a task in Harbor's layout, judged by its own test script."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import trio
from pydantic import Field, field_validator

from agentrl.errors import DataError, ToolError
from agentrl.extras.boxes.box import BoxEnded, BoxFileMissing, BoxRefused
from agentrl.extras.boxes.options import BoxKind, WorkspaceOptions
from agentrl.extras.boxes.workspace import MIB, Workspace
from agentrl.types import JsonObject

TESTS, LOGS = "/tests", "/logs/verifier"
SCRIPT = "test.sh"
OLDER = "task.yaml"
"""The file that a task in Terminal-Bench's older layout has in place of task.toml."""
MAX_REWARD_BYTES = 2**16
MAX_TEST_BYTES = 64 * MIB
KINDS_WITH_FOLDERS: tuple[BoxKind, ...] = ("bubblewrap", "podman", "docker")


class TerminalOptions(WorkspaceOptions):
    """Options in `agent.environment_config.terminal`."""

    kind: BoxKind = Field("podman", description="Where boxes run: bubblewrap, podman or docker.")
    scratch: tuple[str, ...] = Field((TESTS, "/logs"), description="Further writable folders of a box.")
    tests_timeout_s: float = Field(
        40.0,
        gt=0,
        description="Deadline of the tests, also where the task allows more; keep it below "
        "agent.environment_timeout_s.",
    )

    @field_validator("kind")
    @classmethod
    def _has_folders(cls, kind: BoxKind) -> BoxKind:
        if kind not in KINDS_WITH_FOLDERS:
            raise ValueError(
                f"tests write to {TESTS} and /logs, which kind {kind!r} has not; use one of "
                f"{', '.join(KINDS_WITH_FOLDERS)}"
            )
        return kind


@dataclass(frozen=True, slots=True)
class TerminalTask:
    """A folder with task.toml, instruction.md, environment/, tests/test.sh and solution/.

    image: that task.toml names; None: it has only a Dockerfile. tests_timeout_s: of the tests.
    """

    folder: Path
    instruction: str
    image: str | None
    tests_timeout_s: float

    @classmethod
    def read(cls, folder: Path) -> TerminalTask:
        """Read a task.

        Raises:
            DataError: it is no task of this layout.
        """
        try:
            settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            instruction = (folder / "instruction.md").read_text(encoding="utf-8")
            image = settings.get("environment", {}).get("docker_image")
            timeout_s = float(settings.get("verifier", {}).get("timeout_sec", math.inf))
        except OSError as error:
            raise DataError(f"task {folder}: {error.filename}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError, TypeError, ValueError) as error:
            raise DataError(f"task {folder}: task.toml or instruction.md cannot be read: {error}") from error
        if not (folder / "tests" / SCRIPT).is_file():
            raise DataError(f"task {folder}: it has no tests/{SCRIPT}")
        return cls(folder, instruction.strip(), image, timeout_s)

    def row(self, *, image: str | None = None) -> JsonObject:
        """Return the task as a row. image: in place of the one that task.toml names."""
        kwargs: dict[str, Any] = {"name": Terminal.name, "task": str(self.folder.resolve())}
        if (image := image or self.image) is not None:
            kwargs["image"] = image
        return {
            "data_source": "harbor",
            "prompt": [{"role": "user", "content": self.instruction}],
            "agent_name": "tool_agent",
            "extra_info": {"instance_id": self.folder.name, "environment_kwargs": kwargs},
        }

    def files(self, part: str) -> Iterator[tuple[str, bytes]]:
        """Yield (relative path, content) of the files in one of its folders."""
        root = self.folder / part
        for path in sorted(root.rglob("*")):
            if path.is_file():
                yield str(path.relative_to(root)), path.read_bytes()


def task_folders(folder: Path) -> list[Path]:
    """Return the folders of tasks in `folder`: itself, or those below it.

    Raises:
        DataError: there is none, or one is in the older layout.
    """
    if (folder / "task.toml").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/task.toml"))
    older = sorted(path.parent for path in (*folder.glob(OLDER), *folder.glob(f"*/{OLDER}")))
    if unread := [task for task in older if task not in found]:
        raise DataError(
            f"{unread[0]}: a task in Terminal-Bench's older layout ({OLDER}, run-tests.sh), whose tests "
            f"write no reward; convert it to Harbor's layout by `harbor tasks migrate -i {folder} -o NEW`, "
            f"or by hand: task.toml, instruction.md and tests/{SCRIPT}, which writes {LOGS}/reward.txt"
        )
    if found:
        return found
    raise DataError(f"{folder}: no task: neither it nor a folder in it has a task.toml")


class Terminal(Workspace):
    """A box from the task's image. When the agent is done, the task's tests run in the same box, as with
    Harbor, and write the reward.
    """

    name: ClassVar[str] = "terminal"
    options_class = TerminalOptions
    options: TerminalOptions

    async def start(self, *, task: str | None = None, image: str | None = None, **unknown: Any) -> None:
        """Open the box.

        Args:
            task: folder of the task.
            image: what the box starts from; None: the configured image.
        """
        if task is None:
            raise DataError(f"environment {self.name!r}: `task` is missing: the folder of a task")
        self._task = await trio.to_thread.run_sync(TerminalTask.read, Path(task))
        await super().start(image=image, **unknown)

    async def facts(self) -> JsonObject:
        """Return the reward that the tests wrote, and how many commands the model ran.

        Raises:
            ToolError: the tests wrote none.
        """
        return {"reward": await self._verified(), "num_commands": self.num_commands}

    async def _verified(self) -> float:
        box = self._box()
        try:
            for path, content in await trio.to_thread.run_sync(lambda: list(self._task.files("tests"))):
                await box.write(f"{TESTS}/{path}", content)
            # What the model may have written there is no reward.
            await box.run(
                ["bash", "-c", f"rm -rf {LOGS}; mkdir -p {LOGS}"], timeout_s=10, max_output_bytes=1000
            )
            done = await box.run(
                ["bash", f"{TESTS}/{SCRIPT}"],
                timeout_s=min(self._task.tests_timeout_s, self.options.tests_timeout_s),
                max_output_bytes=8000,
                is_merged=True,
            )
            for name in ("reward.txt", "reward.json"):
                try:
                    return reward_of(await box.read(f"{LOGS}/{name}", max_bytes=MAX_REWARD_BYTES), name)
                except BoxFileMissing:
                    continue
        except BoxEnded:  # the model ended its box
            return 0.0
        except BoxRefused as error:
            raise ToolError(f"task {self._task.folder}: its tests cannot be run: {error}") from error
        if done.is_timed_out:  # what the model wrote took too long
            return 0.0
        raise ToolError(
            f"task {self._task.folder}: its tests wrote no reward to {LOGS}: {done.stdout.strip()[-300:]}"
        )


def reward_of(content: bytes, name: str) -> float:
    """Return the reward in reward.txt, a number, or reward.json, an object with `reward` or one number.

    Raises:
        ToolError: it is something else.
    """
    try:
        found = json.loads(content)
        if isinstance(found, dict):
            found = found["reward"] if "reward" in found or len(found) != 1 else next(iter(found.values()))
        if not math.isfinite(value := float(found)):
            raise ValueError(f"{value} is no reward")
        return value
    except (KeyError, TypeError, ValueError) as error:
        raise ToolError(f"{LOGS}/{name} has no reward: {content[:80]!r}: {error!r}") from error
