"""Tools of a real MCP server, over stdio and over streamable HTTP: found, called, lost, found again, and
ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import trio
from mcp.types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from agentrl.adapters.catalog import open_plugins
from agentrl.config.agent import AgentConfig, MCPServerConfig
from agentrl.errors import ConfigError, PluginError, ToolError
from agentrl.extras.mcp.session import MCPSession
from agentrl.extras.mcp.tools import result_text
from agentrl.plugins import Tool, ToolResult
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.testing.contracts import ToolContract
from agentrl.types import Message, Task

SERVER = str(Path(__file__).parents[2] / "parts" / "mcp_server.py")
STDIO = {"command": (sys.executable, SERVER, "stdio")}
NAMES = ["calculator", "process_id", "remember", "recall", "meet", "hang", "die", "picture", "header_hash"]


@contextmanager
def http_server(port: int = 0) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run the server in a process of its own; yield its URL and the process."""
    process = subprocess.Popen(
        [sys.executable, SERVER, "http", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}/mcp", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_server() as (url, _):
        yield url


@pytest.fixture(params=["stdio", "http"])
def server(request: pytest.FixtureRequest) -> dict:
    """The config of a server that lives as long as it is needed."""
    return STDIO if request.param == "stdio" else {"url": request.getfixturevalue("url")}


class Trajectory:
    """The tools of one trajectory, as the toolbox holds them: each built once, with the trajectory's key."""

    def __init__(self, plugins, host: AsyncioHost, key: str) -> None:
        self._plugins, self._host, self._key = plugins, host, key
        self._tools: dict[str, Tool] = {}

    async def call(self, name: str, /, **arguments) -> ToolResult:
        if name not in self._tools:
            tool = self._tools[name] = self._plugins.tools.get(name)()
            tool.trajectory_key = self._key
            await self._host.run(tool.start)
        return await self._host.run(self._tools[name].call, arguments)

    async def close(self) -> None:
        for tool in self._tools.values():
            await self._host.run(tool.close)


def play(config: dict, main, **servers) -> None:
    """Run `main(trajectory)` with the tools of one server named `s`; `trajectory(key)` gives the tools of
    one.
    """
    plugins = open_plugins(AgentConfig(mcp_servers={"s": MCPServerConfig(**config)}))

    async def wrapped() -> None:
        with AsyncioHost() as host, trio.fail_after(60):
            await main(lambda key: Trajectory(plugins, host, key))

    trio.run(wrapped)


def started_servers() -> list[psutil.Process]:
    """Return the stdio servers (and their guards) that this process has."""
    living = [
        child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE
    ]
    return [child for child in living if child.cmdline()[-2:] == [SERVER, "stdio"]]


def wait_until_gone(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


# -------------------------------------------------------------------------------------------------- discovery


def test_each_tool_is_offered_under_the_prefix(server):
    plugins = open_plugins(AgentConfig(mcp_servers={"s": MCPServerConfig(**server)}))
    assert plugins.served_tools == tuple(f"s_{name}" for name in NAMES)
    task = Task("t:0", "", (Message("user", "?"),), "tool_agent", tools_kwargs={"calculator": {}})
    assert plugins.offered_tools(task, ()) == (*plugins.served_tools, "calculator")
    calculator = plugins.tools.get("s_calculator")
    schema = calculator().schema()["function"]
    assert schema["name"] == "s_calculator"
    assert schema["description"] == "Calculate the value of an arithmetic expression."
    assert schema["parameters"]["required"] == ["expression"]
    assert schema["parameters"]["properties"]["expression"]["type"] == "string"
    assert calculator.is_idempotent
    assert not plugins.tools.get("s_die").is_idempotent


def test_a_filter_and_another_prefix(url):
    config = MCPServerConfig(url=url, prefix="", tools=("remember", "calculator"))
    assert open_plugins(AgentConfig(mcp_servers={"s": config})).served_tools == ("calculator", "remember")


def test_discovery_leaves_no_server_behind():
    open_plugins(AgentConfig(mcp_servers={"s": MCPServerConfig(**STDIO)}))
    assert started_servers() == []


async def test_discovery_within_a_running_event_loop(url):
    assert open_plugins(AgentConfig(mcp_servers={"s": MCPServerConfig(url=url)})).served_tools


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"command": ("no-such-program",)},
            PluginError,
            "agent.mcp_servers.s.command: the program 'no-such-program' does not exist",
        ),
        (
            {"command": (sys.executable, "-c", "import sys; sys.exit('no key')")},
            ToolError,
            "did not start.*it wrote: no key",
        ),
        (
            {"command": (sys.executable, "-c", "input(); input()"), "start_timeout_s": 0.5},
            ToolError,
            "did not start within 0.5 s",
        ),
        (
            {"url": "http://127.0.0.1:9/mcp"},
            ToolError,
            r"MCP server 's' \(http://127.0.0.1:9/mcp\) did not start: .*connection",
        ),
        (
            {**STDIO, "tools": ("calc",)},
            PluginError,
            "agent.mcp_servers.s.tools: the server has no tool 'calc'; it has: calculator, ",
        ),
        (
            {"url": "http://127.0.0.1:9/mcp", "headers_env": {"Authorization": "NO_SUCH_KEY"}},
            ConfigError,
            "agent.mcp_servers.s.headers_env.Authorization='NO_SUCH_KEY': this environment variable is not "
            "set",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(config, error, message):
    with pytest.raises(error, match=message) as raised:
        open_plugins(AgentConfig(mcp_servers={"s": MCPServerConfig(**config)}))
    assert "\n" not in str(raised.value)


def test_two_tools_of_one_name_are_refused(url):
    config = MCPServerConfig(url=url, prefix="x_")
    with pytest.raises(
        PluginError, match=r"agent.mcp_servers: another server or file already has a tool 'x_calculator'"
    ):
        open_plugins(AgentConfig(mcp_servers={"a": config, "b": config}))


# ------------------------------------------------------------------------------------------------------ calls


def test_results_and_errors(server):
    async def main(trajectory) -> None:
        tools = trajectory("a")
        assert await tools.call("s_calculator", expression="6*7") == ToolResult("MCP says 42")
        wrong = await tools.call("s_calculator", expression="x")
        assert wrong.is_error
        assert "only numbers" in wrong.text
        assert (await tools.call("s_picture")).text == "look:\n[image omitted]"
        await tools.close()

    play(server, main)


def test_parallel_calls_share_one_server(server):
    async def main(trajectory) -> None:
        seen, pids = [], set()

        async def one(key: str) -> None:
            tools = trajectory(key)
            pids.add((await tools.call("s_process_id")).text)
            seen.append((await tools.call("s_meet", people=5)).text)
            await tools.close()

        async with trio.open_nursery() as nursery:
            for key in "abcde":
                nursery.start_soon(one, key)
        assert seen == ["5 met"] * 5
        assert len(pids) == 1

    play(server, main)


def test_a_cancelled_call_harms_no_other(server):
    async def main(trajectory) -> None:
        tools = trajectory("a")
        await tools.call("s_calculator", expression="1")
        with trio.move_on_after(0.2) as scope:
            await tools.call("s_hang")
        assert scope.cancelled_caught
        assert (await tools.call("s_calculator", expression="1+1")).text == "MCP says 2"

    play(server, main)


def test_a_lost_stdio_server_fails_its_calls_and_the_next_call_starts_another():
    async def main(trajectory) -> None:
        tools = trajectory("a")
        first = int((await tools.call("s_process_id")).text)
        failed: list[str] = []

        async def lose() -> None:
            with pytest.raises(ToolError) as raised:
                await tools.call("s_hang")
            failed.append(str(raised.value))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            nursery.start_soon(lose)
            await trio.testing.wait_all_tasks_blocked()
            os.kill(first, signal.SIGKILL)
        assert len(failed) == 2
        assert all("was lost" in text for text in failed)
        assert (await tools.call("s_calculator", expression="2*3")).text == "MCP says 6"
        assert int((await tools.call("s_process_id")).text) != first
        with pytest.raises(ToolError, match="was lost"):
            await tools.call("s_die")
        assert (await tools.call("s_calculator", expression="2*3")).text == "MCP says 6"

    play(STDIO, main)


@pytest.mark.parametrize("per_trajectory", [False, True])
def test_a_lost_http_server_is_found_again(per_trajectory):
    with http_server() as (url, process):

        async def main(trajectory) -> None:
            tools = trajectory("a")
            assert (await tools.call("s_calculator", expression="1+1")).text == "MCP says 2"
            process.kill()
            process.wait()
            for _ in range(2):
                with pytest.raises(ToolError, match=r"was lost|did not start"):
                    await tools.call("s_calculator", expression="1+1")
            with http_server(int(url.split(":")[2].split("/")[0])):
                if per_trajectory:
                    with pytest.raises(ToolError, match="the session of this trajectory was lost"):
                        await tools.call("s_calculator", expression="2+2")
                    tools = trajectory("b")
                assert (await tools.call("s_calculator", expression="2+2")).text == "MCP says 4"
                await tools.close()

        play({"url": url, "per_trajectory": per_trajectory}, main)


def test_a_restarted_http_server_forgets_sessions_and_the_next_call_gets_another():
    """The server is back before anyone noticed: it answers 404 to the session id that it does not know."""
    with http_server() as (url, process):

        async def main(trajectory) -> None:
            tools = trajectory("a")
            await tools.call("s_remember", text="x")
            process.kill()
            process.wait()
            with http_server(int(url.split(":")[2].split("/")[0])):
                with pytest.raises(ToolError):
                    await tools.call("s_remember", text="y")
                fresh = trajectory("b")
                assert (await fresh.call("s_remember", text="z")).text == "z"

        play({"url": url, "per_trajectory": True}, main)


def test_state_lives_as_long_as_the_trajectory(server):
    """All tools of a trajectory have one session, other trajectories have others."""

    async def main(trajectory) -> None:
        one, other = trajectory("one"), trajectory("other")
        await one.call("s_remember", text="a")
        await other.call("s_remember", text="b")
        await one.call("s_remember", text="c")
        assert (await one.call("s_recall")).text == "a\nc"
        assert (await other.call("s_recall")).text == "b"
        await one.close()
        assert (await other.call("s_recall")).text == "b"
        await other.close()
        assert started_servers() == []

    play({**server, "per_trajectory": True}, main)


def test_a_shared_server_ends_with_the_event_loop():
    pids: list[int] = []

    async def main(trajectory) -> None:
        pids.append(int((await trajectory("a").call("s_process_id")).text))

    play(STDIO, main)
    wait_until_gone(pids[0])
    assert started_servers() == []


def test_a_server_that_ignores_its_end_dies_with_a_killed_run(tmp_path):
    """kill -9 of the run: no clean-up runs, and the server closes neither by itself nor at a signal."""
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import runpy, signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsys.argv[1:] = ['stdio']\n"
        f"try:\n    runpy.run_path({SERVER!r}, run_name='__main__')\nfinally:\n    signal.pause()\n"
    )
    run = tmp_path / "run.py"
    run.write_text(f"""
import sys, trio
from agentrl.adapters.catalog import open_plugins
from agentrl.config.agent import AgentConfig
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.testing.contracts import ToolContract

async def main():
    plugins = open_plugins(AgentConfig(mcp_servers={{"s": {{"command": [sys.executable, {str(stubborn)!r}], "tools": ["process_id"]}}}}))
    with AsyncioHost() as host:
        tool = plugins.tools.get("s_process_id")()
        await host.run(tool.start)
        print((await host.run(tool.call, {{}})).text, flush=True)
        await trio.sleep_forever()

trio.run(main)
""")  # noqa: E501
    process = subprocess.Popen([sys.executable, str(run)], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    assert psutil.pid_exists(pid)
    process.kill()
    process.wait()
    wait_until_gone(pid)


def test_a_command_gets_none_of_the_keys_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("WIKI_TOKEN", "of the wiki")
    program = f"import json, os; open({str(tmp_path / 'seen')!r}, 'w').write(json.dumps(dict(os.environ)))"
    config = {"command": (sys.executable, "-c", program), "env": {"LEVEL": "2"}}

    async def opened(config) -> dict[str, str]:
        with pytest.raises(ToolError, match="did not start"):  # it writes down what it sees, and ends
            await MCPSession("s", MCPServerConfig(**config)).open()
        return json.loads((tmp_path / "seen").read_text())

    seen = asyncio.run(opened(config))
    assert seen["LEVEL"] == "2"
    assert not {"WANDB_API_KEY", "WIKI_TOKEN"} & seen.keys()
    more = asyncio.run(opened(config | {"pass_env": ("WIKI_TOKEN",)}))
    assert more.keys() - seen.keys() == {"WIKI_TOKEN"}
    assert more["WIKI_TOKEN"] == "of the wiki"


def test_header_values_come_from_the_environment_and_appear_nowhere(url, monkeypatch, caplog):
    monkeypatch.setenv("MCP_TEST_KEY", "s3cret")
    caplog.set_level(logging.DEBUG)

    async def main(trajectory) -> None:
        arrived = await trajectory("a").call("s_header_hash", name="authorization")
        assert arrived.text == hashlib.sha256(b"s3cret").hexdigest()

    play({"url": url, "headers_env": {"Authorization": "MCP_TEST_KEY"}}, main)
    assert caplog.records
    assert "s3cret" not in caplog.text


def test_stderr_of_a_server_goes_to_the_log(caplog, capfd):
    caplog.set_level(logging.INFO)
    open_plugins(AgentConfig(mcp_servers={"s": MCPServerConfig(**STDIO)}))
    assert "MCP server 's': the server starts" in caplog.text
    assert "the server starts" not in capfd.readouterr().err


# --------------------------------------------------------------------------------------------------- contract


class TestMCPTool(ToolContract):
    """A session for each trajectory: the shared one outlives them by design."""

    valid_calls = ({"text": "a"}, {"text": "b"})

    @pytest.fixture(autouse=True)
    def served(self, url) -> None:
        config = AgentConfig(
            mcp_servers={"s": MCPServerConfig(url=url, per_trajectory=True, tools=("remember",))}
        )
        type(self).tool = open_plugins(config).tools.get("s_remember")


# ---------------------------------------------------------------------------------------------------- results


def result(*content, structured=None) -> CallToolResult:
    return CallToolResult(content=list(content), structured_content=structured)


def test_what_the_model_reads():
    text = TextContent(type="text", text="a")
    page = EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///p", text="page"))
    blob = EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file:///b", blob="aGk="))
    link = ResourceLink(type="resource_link", name="l", uri="file:///l")
    assert result_text(result(text, text)) == "a\na"
    assert result_text(result(text, structured={"x": 1})) == "a"
    assert result_text(result(structured={"x": "é"})) == '{"x": "é"}'
    assert (
        result_text(result(page, blob, link)) == "page\n[resource omitted: file:///b]\n[resource: file:///l]"
    )
    assert result_text(result()) == ""
