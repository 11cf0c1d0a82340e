"""A whole run in which one rollout actor hangs in a tool for ever: the other one plays its group, too, and
the first gives it up.
"""

from __future__ import annotations

import pytest

PLUGIN = """
import asyncio
import os
from pathlib import Path

from agentrl.plugins import AgentLoop, Tool, ToolResult
from agentrl.types import ToolCall

HUNG, GIVEN_UP = Path("{folder}/hung"), Path("{folder}/given_up")


class Hung(Tool):
    name = "hung"
    description = "never answers in the process that asks first"
    parameters = {{"type": "object", "properties": {{}}}}

    async def call(self, arguments):
        try:
            HUNG.symlink_to(str(os.getpid()))
        except FileExistsError:
            pass
        if os.readlink(HUNG) == str(os.getpid()):
            try:
                await asyncio.Event().wait()
            finally:
                GIVEN_UP.touch()
        return ToolResult("done")


class Patient(Tool):
    name = "patient"
    description = "answers once the other one is given up"
    parameters = {{"type": "object", "properties": {{}}}}

    async def call(self, arguments):
        while not GIVEN_UP.exists():
            await asyncio.sleep(0.1)
        return ToolResult("done")


class HungAgent(AgentLoop):
    name = "hung_agent"

    async def run(self, task, session):
        await session.run_tools([ToolCall("c0", self.name.partition("_")[0], {{}})])
        await session.generate()


class PatientAgent(HungAgent):
    name = "patient_agent"
"""


@pytest.mark.slow
def test_a_straggler_is_played_twice_and_given_up(world):
    """On policy: the first batch needs the group that hangs, and the second one attempts that end only when
    that is given up.
    """
    folder = world.folder / "stragglers"
    folder.mkdir()
    (folder / "hung.py").write_text(PLUGIN.format(folder=folder))
    rows = world.write_rows(folder, {0: "hung_agent", 4: "patient_agent"}, default="single_turn_agent")
    run = world.start(
        "train",
        str(world.config),
        f"trainer.run_dir={folder}/run",
        f"data.train_files=[{rows}]",
        "data.shuffle=false",
        f"agent.plugins=[{folder}/hung.py]",
        "agent.tools=[hung,patient]",
        "agent.tool_timeout_s=3600",
        "agent.trajectory_timeout_s=3600",
        "rollout.num_actors=2",
        "buffer.max_staleness=0",
        "buffer.duplicate_after_s=2",
        "trainer.steps=2",
    )
    assert run.wait(400) == 0, run.output()
    assert sum(record["rollout/withdrawn_groups"] for record in world.records(folder / "run").train) >= 1
    audit = world.start("audit", f"{folder}/run")
    assert audit.wait(100) == 0, audit.output()
