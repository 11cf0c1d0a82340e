"""Hub processes, with real programs: answers, failures, death, restart, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from agentrl.errors import DataError, EnvironmentFailed
from agentrl.extras.hubs import process as module
from agentrl.extras.hubs.process import INSIDE, HubProcess, HubProgram, hub_process
from agentrl.plugins.blame import failure_of

PROGRAM = """
import asyncio, os, pathlib, subprocess, sys, time
from agentrl_hub import Refused, serve

ended = pathlib.Path(__file__).with_name("ended")

async def add(a, b):
    print("adding")  # not an answer
    return a + b

async def refuse():
    raise Refused("write something else")

async def fail():
    return 1 / 0

async def die():
    sys.stderr.write("out of cheese\\n")
    sys.stderr.flush()
    os._exit(3)

async def wait():
    try:
        await asyncio.sleep(600)
    finally:
        ended.write_text(ended.read_text() + "x" if ended.exists() else "x")

async def block():
    time.sleep(600)

async def start_daemon():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, start_new_session=True, **quiet).pid

async def pid():
    return os.getpid()

async def variables():
    return dict(os.environ)

serve({f.__name__: f for f in (add, refuse, fail, die, wait, block, start_daemon, pid, variables)})
"""


@pytest.fixture
def program(tmp_path: Path) -> HubProgram:
    (tmp_path / "program.py").write_text(PROGRAM)
    return made(tmp_path / "program.py")


def made(script: Path, **changed) -> HubProgram:
    values = {"python": sys.executable, "variables": (("PYTHONPATH", str(INSIDE)),), **changed}
    return HubProgram("the world 'w'", script=str(script), **values)


def played(main, program: HubProgram):
    """Return what `main(process)` returns; nothing that the program started is left then."""

    async def whole():
        process = HubProcess(program)
        try:
            return await main(process)
        finally:
            await process.close()

    children = {child.pid for child in psutil.Process().children()}
    found = asyncio.run(whole())
    assert {child.pid for child in psutil.Process().children()} <= children
    return found


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_calls_are_answered_side_by_side_each_with_its_own_answer(program) -> None:
    async def main(process):
        waiting = asyncio.create_task(process.call("wait", {}))
        sums = await asyncio.gather(*(process.call("add", {"a": a, "b": 1}) for a in range(50)))
        waiting.cancel()
        return sums

    assert played(main, program) == list(range(1, 51))


def test_a_program_gets_the_variables_that_it_is_given_and_no_others(program, monkeypatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    given = played(lambda process: process.call("variables", {}), program)
    assert given["PYTHONPATH"] == str(INSIDE)
    assert "SOME_KEY" not in given


def test_what_the_program_raises_is_told_with_its_own_line(program) -> None:
    async def main(process):
        with pytest.raises(EnvironmentFailed) as failed:
            await process.call("fail", {})
        with pytest.raises(DataError, match="write something else"):
            await process.call("refuse", {})
        with pytest.raises(EnvironmentFailed, match="TypeError"):
            await process.call("add", {"c": 1})
        assert await process.call("add", {"a": 1, "b": 2}) == 3, "it goes on"
        return failure_of(failed.value)

    failure = played(main, program)
    line = PROGRAM.split("\n").index("    return 1 / 0") + 1
    assert failure.text == "the world 'w' raised ZeroDivisionError: division by zero"
    assert failure.place == f"{program.script}:{line}"
    assert failure.error == "ZeroDivisionError"


def test_a_death_fails_the_calls_in_flight_and_the_next_call_starts_it_again(program) -> None:
    async def main(process):
        before = await process.call("pid", {})
        waiting = asyncio.create_task(process.call("wait", {}))
        with pytest.raises(EnvironmentFailed, match=r"ended with status 3; it wrote: .*out of cheese"):
            await process.call("die", {})
        with pytest.raises(EnvironmentFailed, match="ended with status 3"):
            await waiting
        return before, await process.call("pid", {})

    before, after = played(main, program)
    assert before != after


def test_a_cancelled_call_is_cancelled_in_the_program(program) -> None:
    async def main(process):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await process.call("wait", {})
        assert await process.call("add", {"a": 1, "b": 1}) == 2

    played(main, program)
    assert Path(program.script).with_name("ended").read_text() == "x"


def test_a_program_that_blocks_is_started_again_when_a_call_in_it_is_cancelled(program, monkeypatch) -> None:
    monkeypatch.setattr(module, "UNHEARD_S", 0.2)

    async def main(process):
        first = await process.call("pid", {})
        waiting = asyncio.create_task(process.call("wait", {}))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await process.call("block", {})
        with pytest.raises(EnvironmentFailed, match=r"did not hear for 0\.2 s .* its code blocks"):
            await waiting
        assert await process.call("pid", {}) != first
        return first

    assert not is_running(played(main, program))


def test_at_the_end_running_calls_clean_up_and_nothing_is_left_not_even_a_session_of_its_own(program) -> None:
    async def main(process):
        waiting = asyncio.create_task(process.call("wait", {}))
        daemon = await process.call("start_daemon", {})
        assert is_running(daemon)
        return daemon, waiting

    daemon, _ = played(main, program)
    assert not is_running(daemon)
    assert Path(program.script).with_name("ended").read_text() == "x"


def test_a_program_that_hangs_is_killed_at_the_end(program, monkeypatch) -> None:
    monkeypatch.setattr(module, "CLEAN_UP_S", 0.1)

    async def main(process):
        pid = await process.call("pid", {})
        asyncio.create_task(process.call("block", {})).add_done_callback(lambda task: task.exception())
        await asyncio.sleep(0.1)
        return pid

    assert not is_running(played(main, program))


def test_nothing_is_left_when_the_owner_is_killed(program, tmp_path: Path) -> None:
    owner = textwrap.dedent(f"""
        import asyncio
        from agentrl.extras.hubs.process import HubProcess, HubProgram

        async def main():
            process = HubProcess({program!r})
            asyncio.create_task(process.call("wait", {{}}))
            print(await process.call("pid", {{}}), await process.call("start_daemon", {{}}), flush=True)
            asyncio.create_task(process.call("block", {{}}))
            await asyncio.sleep(600)

        asyncio.run(main())
    """)
    started = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    pids = [int(word) for word in started.stdout.readline().split()]
    guard = psutil.Process(pids[0]).ppid()
    assert len(pids) == 2
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    started.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in (*pids, guard)))


def test_a_server_ends_with_its_hub_process_although_the_guard_was_killed() -> None:
    async def main(process):
        command = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
        await process.call("url", {"command": command, "health": "/"})
        guard = process._life._process.pid
        below = psutil.Process(guard).children(recursive=True)
        assert len(below) == 2, "the hub process and its server"
        os.kill(guard, signal.SIGKILL)
        return [one.pid for one in below]

    pids = played(main, HubProgram("server", sys.executable, "agentrl_server.py"))
    wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import no_such_module", "ended with status 1; it wrote: .*No module named 'no_such_module'"),
        ("print('hello')", "answered something else than its protocol: b'hello"),
        ("import time; time.sleep(600)", "was not ready within 0.5 s"),
    ],
)
def test_a_start_that_fails_is_one_line_and_is_tried_once_for_all_who_wait(tmp_path, code, says) -> None:
    count = tmp_path / "count"
    (tmp_path / "bad.py").write_text(f"open({str(count)!r}, 'a').write('x')\n{code}\n")
    program = made(tmp_path / "bad.py", start_timeout_s=0.5 if "sleep" in code else 60.0)

    async def main(process):
        calls = (process.call("add", {"a": 1, "b": 2}) for _ in range(8))
        return await asyncio.gather(*calls, return_exceptions=True)

    found = played(main, program)
    assert {type(error) for error in found} == {EnvironmentFailed}
    for error in found:
        failed = pytest.raises(EnvironmentFailed, match=says)
        with failed:
            raise error
    assert count.read_text() == "x"


def test_an_interpreter_that_does_not_exist_is_named(program) -> None:
    missing = made(Path(program.script), python="/no/such/python")

    async def main(process):
        with pytest.raises(EnvironmentFailed, match=r"/no/such/python"):
            await process.call("add", {"a": 1, "b": 2})

    played(main, missing)


def test_equal_programs_of_a_loop_share_a_process_and_other_loops_have_their_own(program) -> None:
    async def one():
        assert hub_process(program) is hub_process(made(Path(program.script)))
        return await hub_process(program).call("pid", {})

    first, second = asyncio.run(one()), asyncio.run(one())
    assert first != second
    wait_until(lambda: not is_running(first) and not is_running(second))


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
def test_a_loop_that_ends_during_a_start_ends_and_leaves_nothing(program, turns: int) -> None:
    """`turns` of the loop after the first call, when the start is somewhere in the middle."""

    async def main() -> None:
        call = asyncio.create_task(hub_process(program).call("pid", {}))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()

    children = {child.pid for child in psutil.Process().children(recursive=True)}
    asyncio.run(main())
    wait_until(lambda: {child.pid for child in psutil.Process().children(recursive=True)} <= children)
