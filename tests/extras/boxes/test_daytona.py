"""Boxes of Daytona: Daytona's own client against a server of the tests with its protocol."""

from __future__ import annotations

import sys

import pytest
import trio
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import ConfigError, DataError, SandboxError
from agentrl.extras.boxes import BoxEnded, OpenBox, Start
from agentrl.extras.boxes.daytona import WAITS_S, DaytonaBoxes
from agentrl.extras.boxes.leases import LABEL, own_lease, sweep
from agentrl.extras.boxes.options import WorkspaceOptions, open_pool
from agentrl.extras.boxes.workspace import Workspace
from parts.box_kinds import daytona_cloud, named
from parts.daytona_server import KEY, PAGE, Cloud

OUTPUT = {"timeout_s": 60.0, "max_output_bytes": 10_000}


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    monkeypatch.setenv("DAYTONA_API_KEY", KEY)
    found = daytona_cloud()
    yield found
    assert found.machines == {}
    assert found.refusals == found.busy == []


def boxes(**options: object) -> DaytonaBoxes:
    return DaytonaBoxes(lifetime_s=99.5, **options)


def test_a_sandbox_has_no_network_a_lease_and_a_lifetime_and_ends_with_its_box(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes(image="other").start(Start(files={"a": b"x" * 100_000}))
        ((_, machine),) = cloud.machines.items()
        assert machine.asked["snapshot"] == "other"
        assert machine.asked["networkBlockAll"] is True
        assert machine.asked["labels"][LABEL] == str(own_lease())
        assert machine.asked["ttlMinutes"] == 2
        assert await box.read("a", max_bytes=2**20) == b"x" * 100_000  # too long for an argument
        await box.write("b", b"y" * 2**21)
        assert await box.read("b", max_bytes=2**22) == b"y" * 2**21  # too long for an answer that is told
        assert KEY not in (await box.run(["env"], **OUTPUT)).stdout
        done = await box.run(["sh", "-c", "echo out; echo err >&2"], **OUTPUT)
        assert (done.stdout, done.stderr) == ("out\n", "err\n")  # Daytona joins them
        await box.run(["bash", "-c", "(exec -a daytona-left sleep 999) >/dev/null 2>&1 &"], **OUTPUT)
        with trio.fail_after(60):
            while not named("daytona-left"):
                await trio.sleep(0.01)
        await box.stop()
        await box.stop()
        assert named("daytona-left") == []
        with pytest.raises(BoxEnded, match="the box was stopped"):
            await box.run(["true"], **OUTPUT)

    trio.run(main)


def test_a_start_that_is_cancelled_leaves_no_sandbox(cloud: Cloud) -> None:
    async def main() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await boxes().start(Start())
        assert scope.cancelled_caught
        assert cloud.machines == {}

    trio.run(main)


@pytest.mark.parametrize("refusals", [[429], [503, 429, 502]])
def test_a_start_is_tried_again_as_long_as_the_cloud_is_busy_or_broken(
    cloud: Cloud, refusals: list[int]
) -> None:
    async def main() -> None:
        cloud.refusals = list(refusals)
        box = await boxes().start(Start())
        assert cloud.refusals == []
        await box.stop()

    trio.run(main)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_cloud_that_keeps_refusing_is_no_fault_of_the_row(cloud: Cloud, status: int) -> None:
    async def main() -> None:
        cloud.refusals = [status] * 20
        with pytest.raises(SandboxError, match=r"Daytona: .*not now"):
            await boxes().start(Start(image="other"))
        assert 20 - len(cloud.refusals) == len(WAITS_S) + 1
        cloud.refusals = []

    trio.run(main)


def test_a_sandbox_that_never_starts_is_removed(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.extras.boxes.daytona.START_S", 2)
    monkeypatch.setattr(cloud, "first_state", "pulling_snapshot")

    async def main() -> None:
        with pytest.raises(SandboxError, match="Daytona: Failed to create sandbox"):
            await boxes().start(Start())

    trio.run(main)


def test_a_command_is_sent_again_only_if_it_was_not_run(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        cloud.busy = [429, 429]
        await box.run(["sh", "-c", "echo once >> a"], **OUTPUT)
        assert await box.read("a", max_bytes=100) == b"once\n"
        cloud.busy = [502]
        with pytest.raises(SandboxError, match=r"Daytona: .*not now"):
            await box.run(["true"], **OUTPUT)
        await box.stop()

    trio.run(main)


def test_a_snapshot_that_is_not_there_is_the_rows_fault_and_a_wrong_key_is_not(cloud: Cloud) -> None:
    async def main() -> None:
        with pytest.raises(DataError, match=r"image 'mine': Daytona starts no such snapshot: .* not found"):
            await boxes().start(Start(image="mine"))
        with pytest.raises(SandboxError, match="the key is not known"):
            await boxes(api_key="dtn_9999").start(Start())

    trio.run(main)


def test_a_sandbox_that_daytona_lost_is_no_fault_of_the_model(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        ((name, machine),) = cloud.machines.items()

        async def lose() -> None:
            while not named("daytona-busy"):
                await trio.sleep(0.01)
            del cloud.machines[name]
            machine.end()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lose)
            with pytest.raises(SandboxError, match="the sandbox is destroyed before its time"):
                await box.run(["bash", "-c", "exec -a daytona-busy sleep 999"], **OUTPUT)
        await box.stop()

    trio.run(main)


def test_a_sandbox_that_stopped_or_is_too_old_ends_its_box(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        ((name, _),) = cloud.machines.items()
        cloud.states[name] = "stopped"
        for _ in range(2):
            with pytest.raises(BoxEnded, match="its files are gone: its sandbox is stopped"):
                await box.run(["true"], **OUTPUT)
        await box.stop()
        old = await DaytonaBoxes(lifetime_s=0.0).start(Start())
        ((name, machine),) = cloud.machines.items()
        del cloud.machines[name]
        machine.end()
        with pytest.raises(BoxEnded, match="its sandbox is destroyed"):
            await old.run(["true"], **OUTPUT)
        await old.stop()

    trio.run(main)


@pytest.mark.parametrize("kills", ["kill -9 $PPID", "rm -rf ../work; kill -9 $PPID"])
def test_a_command_that_kills_its_servant_ends_the_box_and_breaks_nothing(cloud: Cloud, kills: str) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        with pytest.raises(BoxEnded, match="a command destroyed its answer"):
            await box.run(["bash", "-c", kills], **OUTPUT)
        assert cloud.machines == {}

    trio.run(main)


def test_a_servant_that_is_stopped_ends_the_box_at_its_deadline(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.extras.boxes.machine_box.ANSWER_S", 1.0)

    async def main() -> None:
        box = await boxes().start(Start())
        with pytest.raises(BoxEnded, match="a command destroyed its answer"):
            await box.run(["bash", "-c", "kill -STOP $PPID"], timeout_s=0.5, max_output_bytes=10)

    trio.run(main)


def test_sandboxes_whose_owner_has_ended_are_found_and_removed(cloud: Cloud) -> None:
    async def main() -> list[OpenBox]:
        return [await boxes().start(Start()) for _ in range(PAGE + 1)]

    opened = trio.run(main)
    keeper = boxes()
    assert [(one.name, one.ownership) for one in keeper.found()] == [
        (name, "in use") for name in cloud.machines
    ]
    assert sweep(keeper) == []
    name, machine = list(cloud.machines.items())[-1]
    lease = own_lease()
    machine.asked["labels"][LABEL] = str(lease).replace(f"/{lease.pid}/", "/1/")
    listed = CliRunner().invoke(app, ["boxes", "--cloud", "daytona"])
    assert listed.exit_code == 1
    assert f"{name}  nobody's" in listed.output
    removed = CliRunner().invoke(app, ["boxes", "--cloud", "daytona", "--remove"])
    assert f"{name}  removed" in removed.output
    assert len(cloud.machines) == PAGE
    for box in opened:
        trio.run(box.stop)


def test_an_answer_that_a_command_removed_is_not_there(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        assert await trio.to_thread.run_sync(box._machine.read, "/tmp/no-such-answer") is None
        await box.stop()

    trio.run(main)


def test_the_tools_of_a_workspace_work_on_a_sandbox(cloud: Cloud) -> None:
    workspace = Workspace({"kind": "daytona", "image": "other", "lifetime_s": 60})

    async def main() -> None:
        await workspace.start(files={"a.txt": "one\n"})
        assert (await workspace.bash("cat a.txt; echo more >&2")).text == "one\nmore"
        await workspace.python("x = 20")
        assert (await workspace.python("x + 1")).text == "21"
        await workspace.edit("a.txt", "one", "two")
        fork = await workspace.fork()
        assert (await fork.bash("cat a.txt")).text == "two"
        await fork.close()
        await workspace.close()

    trio.run(main)


def test_bad_options_are_answered_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAYTONA_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="set the environment variable DAYTONA_API_KEY"):
        boxes().check()
    with pytest.raises(ConfigError, match=r"api_key_env='NOT_SET': this environment variable is not set"):
        open_pool(WorkspaceOptions(kind="daytona", api_key_env="NOT_SET"))
    with pytest.raises(ValueError, match="no further writable folders"):
        WorkspaceOptions(kind="daytona", scratch=("/data",))
    monkeypatch.setitem(sys.modules, "daytona", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[daytona\]'"):
        boxes().check()
