"""The environment `workspace`: a box per attempt, with the tools `bash`, `python` and `edit`."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import trio

from agentrl.errors import DataError, SandboxError
from agentrl.extras.boxes.box import BoxFileMissing, BoxRefused, Executed, OpenBox, Start
from agentrl.extras.boxes.edits import replaced
from agentrl.extras.boxes.options import WorkspaceOptions, open_pool
from agentrl.extras.boxes.pool import BoxPool
from agentrl.plugins import Environment, ToolResult, WrongCall, tool
from agentrl.plugins.options import read_options
from agentrl.plugins.tools import Runtime
from agentrl.types import JsonObject

INTERPRETER = (Path(__file__).parent / "inside" / "interpreter.py").read_text(encoding="utf-8")
INTERPRETER_ROOM_S = 15.0
"""Seconds that the interpreter may take beyond its code's time: to start, and to be interrupted."""
MAX_EDITED_BYTES = 2**20
MIB = 2**20


class Workspace(Environment):
    """A box whose working folder begins with the row's files. It ends with the attempt, however that ends."""

    name: ClassVar[str] = "workspace"
    runtime: ClassVar[Runtime] = "trio"
    options_class: ClassVar[type[WorkspaceOptions]] = WorkspaceOptions

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self.options = read_options(self.options_class, self.config, plugin=f"environment {self.name!r}")
        self.pool: BoxPool | None = None
        with contextlib.suppress(SandboxError):  # no fault of the config: `open` tries again
            self.pool = open_pool(self.options)
        self.box: OpenBox | None = None
        self.image: str | None = None
        self.num_commands = 0

    async def start(
        self,
        *,
        files: Mapping[str, str] | None = None,
        archive: str | None = None,
        image: str | None = None,
        **unknown: Any,
    ) -> None:
        """Open the box.

        Args:
            files: path below the working folder -> text.
            archive: a tar file (also .tar.gz) with the working folder.
            image: what the box starts from, for kinds that have images.

        Raises:
            DataError: the row's files make no sense, or it has an unknown key.
        """
        if unknown:
            raise DataError(
                f"environment {self.name!r}: unknown environment_kwargs {', '.join(sorted(unknown))}; "
                "see agentrl/extras/boxes/README.md for its keys"
            )
        content = None if archive is None else await trio.to_thread.run_sync(self._archive, archive)
        self.image = image
        await self.open(Start(image, content, written(files or {}, "files")))

    async def open(self, start: Start) -> None:
        """Open the box, in place of the one before.

        Raises:
            DataError: the box does not take what the row has.
        """
        try:
            await self._open(start)
        except BoxRefused as error:
            raise DataError(
                f"environment {self.name!r}: the box does not take the row's files: {error}"
            ) from error

    async def _open(self, start: Start) -> None:
        before, self.box = self.box, None
        if self.pool is None:
            self.pool = open_pool(self.options)
        self.box = await (self.pool.open(start) if before is None else self.pool.replace(before, start))

    @tool
    async def bash(self, command: str) -> ToolResult:
        """Run a command with bash and read what it prints. Each call begins in the working folder.
        Files stay, variables and the current folder do not. There is no network.

        Args:
            command: one or more lines for bash.
        """
        return self._told(await self._run(["bash", "-c", command], timeout_s=self.options.command_timeout_s))

    @tool
    async def python(self, code: str) -> ToolResult:
        """Run Python code and read what it prints; the value of a last expression is shown too.
        Variables stay from call to call.

        Args:
            code: the code.
        """
        timeout_s = self.options.command_timeout_s
        request = json.dumps({"code": code, "timeout_s": timeout_s}).encode()
        command = ["python3", "-c", INTERPRETER, "call", INTERPRETER]
        executed = await self._run(command, stdin=request, timeout_s=timeout_s + INTERPRETER_ROOM_S)
        return self._told(executed, is_exit_code_told=False)

    @tool
    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a part of a file. A new file is written if there is none and `old` is empty.

        Args:
            path: the file, from the working folder.
            old: the text to replace, exactly as it is in the file; it must be there once.
            new: the text that takes its place.
        """
        box = self._box()
        try:
            text = await self._text(box, path)
            if text is None:
                if old:
                    raise WrongCall(f"{path}: no such file; to write a new one, leave `old` empty")
                await box.write(path, new.encode())
                return f"wrote {path}"
            await box.write(path, replaced(text, old, new, path=path).encode())
            return f"changed {path}"
        except BoxRefused as error:
            raise WrongCall(f"{path}: {error}") from error
        except UnicodeEncodeError as error:
            raise WrongCall(f"{path}: the text has a character that UTF-8 cannot write") from error

    async def snapshot(self) -> bytes:
        """Return the working folder as a tar archive.

        Raises:
            BoxRefused: the box is over, or its files take more than twice `disk_mib` as an archive.
        """
        return await self._box().snapshot(max_bytes=self._max_bytes)

    async def restore(self, snapshot: bytes) -> None:
        """Open a fresh box with the working folder of a snapshot, in place of the box before.

        Its processes and the variables of `python` are gone.
        """
        await self.open(Start(self.image, snapshot))

    async def fork(self) -> Self:
        """Return another workspace with a copy of the working folder. Whoever calls this closes it.

        It takes a box of its own, and waits while all `max_boxes` are open.

        Raises:
            BoxRefused: as `snapshot`.
        """
        other = copy.copy(self)
        other.box = None
        await other.open(Start(self.image, await self.snapshot()))
        return other

    async def facts(self) -> JsonObject:
        return {"num_commands": self.num_commands}

    async def close(self) -> None:
        box, self.box = self.box, None
        if box is not None and self.pool is not None:
            await self.pool.close(box)

    async def _run(self, command: list[str], *, timeout_s: float, stdin: bytes = b"") -> Executed:
        self.num_commands += 1
        try:
            return await self._box().run(
                command,
                timeout_s=timeout_s,
                max_output_bytes=self.options.output_kib * 1024,
                stdin=stdin,
                is_merged=True,
            )
        except BoxRefused as error:
            raise WrongCall(str(error)) from error

    def _told(self, executed: Executed, *, is_exit_code_told: bool = True) -> ToolResult:
        output, notes = executed.stdout.rstrip(), []
        if executed.is_timed_out:
            notes.append(f"[ended after {executed.wall_s:.1f} s: it took too long]")
        elif executed.exit_code != 0 and is_exit_code_told:
            notes.append(f"[exit code {executed.exit_code}]")
        is_error = executed.is_timed_out or executed.exit_code != 0
        text = "\n".join([*([output] if output else []), *notes]) or "(no output)"
        return ToolResult(
            text, metrics={"wall_s": executed.wall_s, "failures": float(is_error)}, is_error=is_error
        )

    async def _text(self, box: OpenBox, path: str) -> str | None:
        """Return a file's text; None if there is no such file."""
        try:
            content = await box.read(path, max_bytes=MAX_EDITED_BYTES)
        except BoxFileMissing:
            return None
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise WrongCall(f"{path} is not a text in UTF-8; use bash") from error

    @property
    def _max_bytes(self) -> int:
        return 2 * self.options.disk_mib * MIB  # tar pads each file

    def _box(self) -> OpenBox:
        assert self.box is not None, "tools are called between `start` and `close`"
        return self.box

    def _archive(self, path: str) -> bytes:
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise DataError(f"environment {self.name!r}: archive {path!r}: {error.strerror}") from error


def written(files: Mapping[str, str], key: str) -> dict[str, bytes]:
    """Return texts by path as bytes.

    Raises:
        DataError: `files` is no mapping of relative paths to texts.
    """
    if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
        raise DataError(f"{key}: must be a mapping from paths to texts")
    for path in files:
        if path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")):
            raise DataError(f"{key}: {path!r}: give a path below the working folder, without `..`")
    return {path: text.encode("utf-8", "surrogatepass") for path, text in files.items()}
