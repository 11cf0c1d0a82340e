"""Whatever a plugin raises ends its own attempt and nothing else; cancellation and Ctrl-C still pass."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import trio

from agentrl.errors import PluginError
from agentrl.plugins import (
    AgentLoop,
    Interaction,
    InteractionReply,
    Reward,
    RewardResult,
    Tool,
    ToolResult,
    load_plugins,
)
from agentrl.plugins.contained import PluginQuit, contained
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.types import Outcome
from parts.scripted import call, play

FOREVER_S = 60.0


class Panic(BaseException):
    """What a library in Rust raises where it has a mistake."""


def raise_(kind: str) -> None:
    match kind:
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "panic":
            raise Panic("unwrap of None")
        case "cancelled":
            raise asyncio.CancelledError
        case "group":
            raise BaseExceptionGroup("many", [ValueError("other"), SystemExit(3)])


KINDS = ("exit", "interrupt", "panic", "group")
SAID = {
    "exit": "sys.exit(3)",
    "interrupt": "KeyboardInterrupt",
    "panic": "Panic: unwrap of None",
    "group": "sys.exit(3)",
    "cancelled": "ancelled",
}


class AsyncioTool(Tool):
    name: ClassVar[str] = "quitting"
    description: ClassVar[str] = "quits"
    parameters: ClassVar = {"type": "object", "properties": {"kind": {"type": "string"}}}

    async def call(self, arguments) -> ToolResult:
        raise_(arguments["kind"])
        return ToolResult("fine")


class TrioTool(AsyncioTool):
    runtime = "trio"


class BackgroundTool(AsyncioTool):
    """Leaves a task behind that raises; asyncio ends the loop for it."""

    async def call(self, arguments) -> ToolResult:
        task = asyncio.get_running_loop().create_task(self._later(arguments["kind"]))
        await asyncio.wait([task])
        # looked at: asyncio logs what nobody looked at when garbage is collected, in whatever else runs then
        task.exception()
        return ToolResult("fine")

    async def _later(self, kind: str) -> None:
        raise_(kind)


class ConstructedTool(AsyncioTool):
    """Fails for each trajectory, and not where it is asked for its schema."""

    made: ClassVar[int] = 0

    def __init__(self, config=None) -> None:
        super().__init__(config)
        type(self).made += 1
        if type(self).made > 1:
            raise_(self.config["kind"])


def quitting(kind: str) -> str:
    """Quit.

    Args:
        kind: how.
    """
    raise_(kind)
    return "fine"


@pytest.mark.parametrize("kind", [*KINDS, "cancelled"])
@pytest.mark.parametrize("tool", [AsyncioTool, TrioTool, quitting], ids=["asyncio", "trio", "function"])
def test_a_tool_that_quits_is_a_tool_error_of_its_attempt(tool, kind):
    found = play([call("quitting", kind=kind), "done"], tools=[tool])
    assert found.outcome is Outcome.TOOL_ERROR
    assert SAID[kind] in str(found.failure)


@pytest.mark.parametrize("kind", KINDS)
def test_a_constructor_that_quits_is_a_tool_error(kind):
    ConstructedTool.made = 0
    found = play(
        [call("quitting", kind=kind), "done"],
        tools=[ConstructedTool],
        tool_config={"quitting": {"kind": kind}},
    )
    assert found.outcome is Outcome.TOOL_ERROR
    assert SAID[kind] in str(found.failure)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_a_tool_left_behind_ends_neither_the_loop_nor_its_calls(kind):
    found = play(
        [call("quitting", kind=kind), call("quitting", kind="none"), "done"],
        tools=[BackgroundTool],
        max_turns=3,
    )
    assert found.outcome is Outcome.COMPLETED
    assert [message.content for message in found.messages if message.role == "tool"] == ["fine", "fine"]


def test_a_loop_that_a_plugin_ended_runs_again_with_all_of_its_tasks():
    """A task that was waiting goes on where it was, whatever ended the loop."""

    async def stop() -> None:
        asyncio.get_running_loop().stop()

    async def interrupt() -> None:
        asyncio.get_running_loop().call_soon(raise_, "interrupt")

    async def wait(begun: threading.Event) -> str:
        begun.set()
        while not released.is_set():
            await asyncio.sleep(0.001)
        return "went on"

    async def main() -> str:
        said: list[str] = []
        begun = threading.Event()

        async def keep(host: AsyncioHost) -> None:
            said.append(await host.run(wait, begun))

        with AsyncioHost() as host, trio.fail_after(FOREVER_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(keep, host)
                await trio.to_thread.run_sync(begun.wait)
                await host.run(stop)
                await host.run(interrupt)
                assert await host.run(asyncio.sleep, 0, "answered") == "answered"
                released.set()
        return said[0]

    released = threading.Event()
    assert trio.run(main) == "went on"


class QuittingPartner(Interaction):
    name: ClassVar[str] = "quitting_partner"

    async def respond(self, messages) -> InteractionReply:
        raise_(messages[-1].content)
        return InteractionReply("fine", is_final=True)


class TrioPartner(QuittingPartner):
    runtime = "trio"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("partner", [QuittingPartner, TrioPartner])
def test_a_partner_that_quits_is_a_tool_error(partner, kind):
    found = play([kind], agent="interaction_agent", interaction=partner)
    assert found.outcome is Outcome.TOOL_ERROR
    assert SAID[kind] in str(found.failure)


class QuittingAgent(AgentLoop):
    name: ClassVar[str] = "quitting_agent"

    async def run(self, task, session) -> None:
        turn = await session.generate()
        raise_(turn.message.content)


class AsyncioAgent(QuittingAgent):
    async def run(self, task, session) -> None:
        turn = await session.generate()
        await session.run_asyncio(self._play, turn.message.content)

    async def _play(self, kind: str) -> None:
        raise_(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("agent", [QuittingAgent, AsyncioAgent])
def test_an_agent_that_quits_aborts_its_attempt(agent, kind):
    found = play([kind], agent=agent)
    assert found.outcome is Outcome.ABORTED
    assert SAID[kind] in str(found.failure)


def reward_in(place: str) -> type[Reward]:
    def score(self, attempt):
        raise_(attempt.answer)
        return RewardResult(1.0)

    async def score_async(self, attempt):
        return score(self, attempt)

    body = score_async if place in ("asyncio", "trio") else score
    return type("Quitting", (Reward,), {"name": f"quitting_{place}", "runs_in": place, "score": body})


@pytest.mark.parametrize("kind", [*KINDS, "cancelled"])
@pytest.mark.parametrize("place", ["inline", "thread", "asyncio", "trio"])
def test_a_reward_that_quits_is_a_reward_error(place, kind):
    found = play([kind], reward=reward_in(place))
    assert found.outcome is Outcome.REWARD_ERROR
    assert SAID[kind] in str(found.failure)
    assert not found.rewards


IN_PROCESS = """
from agentrl.plugins import Reward, RewardResult
class Quitting(Reward):
    name = "quitting_process"
    runs_in = "process"
    def score(self, attempt):
        raise {"exit": SystemExit(3), "interrupt": KeyboardInterrupt()}[attempt.answer]
"""


@pytest.mark.parametrize("kind", ["exit", "interrupt"])
def test_a_reward_that_quits_in_its_process_is_a_reward_error_with_its_words(tmp_path, kind):
    (tmp_path / "quitting.py").write_text(IN_PROCESS)
    found = play([kind], reward=f"{tmp_path}/quitting.py:Quitting")
    assert found.outcome is Outcome.REWARD_ERROR
    assert SAID[kind] in str(found.failure)


def test_a_plugin_file_that_quits_is_told(tmp_path):
    (tmp_path / "quitting.py").write_text("import sys\nsys.exit('usage: quitting FILE')\n")
    with pytest.raises(PluginError, match=r"fails to import: .*sys\.exit\(usage"):
        load_plugins([f"{tmp_path}/quitting.py"])


# ------------------------------------------------------------------------------------------- what has to pass


def test_cancellation_passes_alone_and_out_of_a_group():
    async def quit_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise BaseExceptionGroup("both", [SystemExit(1), sys.exc_info()[1]])

    async def main() -> bool:
        for wait in (trio.sleep_forever, quit_when_cancelled):
            with trio.CancelScope() as scope:
                scope.cancel()
                with contained(trio.Cancelled):
                    await wait()
            assert scope.cancelled_caught
        return True

    assert trio.run(main)


def test_an_exception_passes_as_it_is_and_a_closed_coroutine_ends():
    with pytest.raises(LookupError, match="mine"), contained():
        raise LookupError("mine")
    with pytest.raises(PluginQuit), contained():
        raise Panic

    async def hold() -> None:
        with contained():
            await asyncio.sleep(0)

    coroutine = hold()
    coroutine.send(None)
    coroutine.close()


INTERRUPTED = """
import sys

import trio

sys.path.insert(0, TESTS)
from agentrl.plugins import Tool, ToolResult
from parts.scripted import call
from parts.scripted import play

class Busy(Tool):
    name, description, parameters, runtime = "busy", "is busy", {"type": "object"}, "trio"
    async def call(self, arguments):
        print("begun", flush=True)
        while True:
            if not arguments["spins"]:
                await trio.sleep(0.01)

try:
    play([call("busy", spins=SPINS), "done"], tools=[Busy])
except KeyboardInterrupt:
    print("interrupted")
except BaseExceptionGroup as group:
    print("interrupted" if group.subgroup(KeyboardInterrupt) else "no")
"""


@pytest.mark.parametrize("spins", [True, False])
def test_ctrl_c_while_a_plugin_runs_ends_the_command(spins):
    tests = repr(str(Path(__file__).parents[1]))
    program = INTERRUPTED.replace("SPINS", str(spins)).replace("TESTS", tests)
    running = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "begun\n"
    os.kill(running.pid, signal.SIGINT)
    assert running.stdout.read() == "interrupted\n"
    assert running.wait(FOREVER_S) == 0
