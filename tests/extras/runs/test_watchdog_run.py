"""A whole run that stands still for a while: what it waits for is said and written, and then it goes on."""

from __future__ import annotations

import pytest

PLUGIN = """
import asyncio

from agentrl.plugins import AgentLoop, Tool, ToolResult
from agentrl.types import ToolCall


class Sleeper(Tool):
    name = "sleeper"
    description = "answers after an hour"
    parameters = {"type": "object", "properties": {}}

    async def call(self, arguments):
        await asyncio.sleep(3600)
        return ToolResult("awake")


class SleepyAgent(AgentLoop):
    name = "sleepy_agent"

    async def run(self, task, session):
        await session.run_tools([ToolCall("c0", "sleeper", {})])
"""


@pytest.mark.slow
def test_a_run_says_what_it_waits_for_and_goes_on(world):
    """Of the first batch one group hangs in a tool until its deadline; on policy, the others have nothing to
    do meanwhile.
    """
    folder = world.folder / "sleepy"
    folder.mkdir()
    (folder / "sleepy.py").write_text(PLUGIN)
    rows = world.write_rows(folder, {0: "sleepy_agent"})
    run = world.start(
        "train",
        str(world.config),
        f"trainer.run_dir={folder}/run",
        f"data.train_files=[{rows}]",
        "data.shuffle=false",
        f"agent.plugins=[{folder}/sleepy.py]",
        "agent.tools=[calculator,sleeper]",
        "agent.tool_timeout_s=900",
        "agent.trajectory_timeout_s=20",
        "rollout.max_retries=0",
        "buffer.max_staleness=0",
        "trainer.steps=1",
        "trainer.watchdog_s=4",
    )
    assert run.wait(400) == 0, run.output()
    reports = [file.read_text() for file in sorted((folder / "run/watchdog").glob("*.txt"))]
    named = [
        report
        for report in reports
        if "group 0 member 1 (sleepy_agent)" in report and "tool sleeper" in report
    ]
    assert named, run.output()
    assert "controller: in phase 'take'" in named[0]
    assert "server_0 http://" in named[0]
    assert " running, " in named[0]
    assert "no progress for" in run.output()
    assert [line.split()[-3] for line in (folder / "run/readiness.txt").read_text().splitlines()] == [
        "1/1"
    ] * 4
