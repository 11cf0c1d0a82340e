"""Boxes of processes: one sandboxed program per box (agentrl/extras/sandbox/README.md) is the servant."""

from __future__ import annotations

import os

from agentrl.errors import DataError
from agentrl.extras.boxes.box import BoxMaker, OpenBox, Start
from agentrl.extras.boxes.served_box import SERVANT, ServedBox, filled
from agentrl.extras.sandbox import Program, RunningProgram, Sandbox


class ProcessBoxes(BoxMaker):
    """Starts boxes within the limits of `sandbox`. Its `wall_s` and `cpu_s` are those of a whole box."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def check(self) -> None:
        self._sandbox.check()

    async def start(self, start: Start) -> OpenBox:
        if start.image is not None:
            raise DataError(
                f"image {start.image!r}: boxes of kind 'process' have no images; use kind: bubblewrap, "
                "podman or docker"
            )
        requests, answers = os.pipe(), os.pipe()
        program = Program(SERVANT, commands=True)
        try:
            running = self._sandbox.start(program, channel=(requests[0], answers[1]))
        except BaseException:
            os.close(requests[1])
            os.close(answers[0])
            raise
        return await filled(
            ServedBox(SandboxedServant(running), requests=requests[1], answers=answers[0]), start
        )


class SandboxedServant:
    """A servant within the walls of one sandboxed program. All processes of the box end with it."""

    def __init__(self, running: RunningProgram) -> None:
        self._running = running

    def wait(self, timeout_s: float) -> str | None:
        ended = self._running.wait(timeout_s)
        return None if ended is None else ended.describe()

    def stop(self, timeout_s: float) -> None:
        self._running.stop(timeout_s)
