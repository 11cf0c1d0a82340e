"""Settings and limits of environments that `agentrl new` wrote."""

from __future__ import annotations

from typing import ClassVar

import pytest
import trio

from agentrl.adapters.catalog import agent_plugins
from agentrl.config.agent import AgentConfig
from agentrl.errors import PluginError
from agentrl.extras.testing.scaffold import write_plugin
from agentrl.plugins import (
    Environment,
    WrongCall,
    tool,
)
from parts.scripted import call, play


class Counter(Environment):
    """Counts. Its class knows every instance that was started."""

    name: ClassVar[str] = "counter"
    runtime: ClassVar = "trio"
    started: ClassVar[list[Counter]] = []

    def __init__(self, config=None) -> None:
        super().__init__(config)
        self.log: list[str] = []
        self.value = 0

    async def start(self, *, first: int = 0, fault: str = "") -> None:
        self.value, self.fault = first, fault
        self.log.append("start")
        self.started.append(self)
        if fault == "start":
            raise OSError("no room")
        if fault == "start hangs":
            await trio.sleep_forever()

    @tool
    async def add(self, number: int = 1) -> str:
        """Add a number."""
        before = self.value
        await trio.sleep(0)  # lets other calls of the turn run, if any may
        self.value = before + number
        self.log.append(f"add {number}")
        return str(self.value)

    async def facts(self):
        if self.fault == "facts":
            raise KeyError("count")
        if self.fault == "wrong facts":  # as a method under @tool does, if `facts` calls it
            raise WrongCall("no such item")
        return {"value": self.value} if self.fault != "plain" else {"value": object()}

    async def close(self) -> None:
        self.log.append("close")
        if self.fault == "close":
            raise OSError("stuck")


@pytest.fixture(autouse=True)
def started() -> list[Counter]:
    Counter.started.clear()
    return Counter.started


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        ({"environment": "shop"}, "agent.environment: unknown environment 'shop'"),
        ({"environment_config": {"shop": {}}}, "agent.environment_config.shop: unknown environment 'shop'"),
        (
            {"tool_config": {"boxes.open_box": {}}, "plugins": ["{boxes}"]},
            "a method of an environment has no settings of its own: write agent.environment_config.boxes",
        ),
        (
            {"tool_config": {"open_box": {}}, "plugins": ["{boxes}"]},
            "agent.tool_config.open_box: a method of an environment has no settings of its own: write "
            "agent.environment_config.boxes",
        ),
        (
            {"tools": ["open_box"], "plugins": ["{boxes}"]},
            "agent.tools: the tool 'open_box' is a method of an environment: rows with the environment offer",
        ),
        (
            {"tools": ["boxes.open_box"], "plugins": ["{boxes}"]},
            "agent.tools: the tool 'boxes.open_box' is a method of an environment",
        ),
        (
            {"tool_limits": {"open_box": {}}, "plugins": ["{boxes}", "{crates}"]},
            "several environments have this tool: write one of boxes.open_box, crates.open_box",
        ),
        (
            {"tool_limits": {"boxes.shut": {}}, "plugins": ["{boxes}"]},
            "unknown tool 'boxes.shut'; registered",
        ),
    ],
)
def test_settings_that_nothing_reads(tmp_path, agent, problem):
    written = {name: write_plugin("environment", name, tmp_path).file for name in ("boxes", "crates")}
    sources = [source.format(**written) for source in agent.get("plugins", ())]
    with pytest.raises(PluginError, match=problem):
        agent_plugins(AgentConfig(**{**agent, "plugins": sources}))


@pytest.mark.parametrize("name", ["boxes.open_box", "open_box"])
def test_limits_of_a_method_are_under_its_name_with_or_without_its_environment(tmp_path, name):
    written = write_plugin("environment", "boxes", tmp_path)
    limits = {name: {"max_output_tokens": 2}}
    agent_plugins(AgentConfig(plugins=[str(written.file)], tool_limits=limits))
    trajectory = play(
        [call("open_box", number=1), "done"],
        environment=f"{written.file}:Boxes",
        environment_kwargs={"boxes": 2, "prize": 2},
        tool_limits=limits,
    )
    assert trajectory.metrics["num_cut_outputs"] == 1
