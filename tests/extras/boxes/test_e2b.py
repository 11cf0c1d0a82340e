"""Boxes of E2B: E2B's own client against a server of the tests with its protocol."""

from __future__ import annotations

import sys

import pytest
import trio
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import ConfigError, DataError, SandboxError
from agentrl.extras.boxes import BoxEnded, OpenBox, Start
from agentrl.extras.boxes.e2b import E2bBoxes
from agentrl.extras.boxes.leases import LABEL, own_lease, sweep
from agentrl.extras.boxes.options import WorkspaceOptions, open_pool
from agentrl.extras.boxes.workspace import Workspace
from parts.box_kinds import e2b_cloud, named
from parts.e2b_server import KEY, Cloud

OUTPUT = {"timeout_s": 60.0, "max_output_bytes": 10_000}


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    monkeypatch.setattr("agentrl.extras.boxes.e2b.LATE_S", (0.0,) * 5)
    monkeypatch.setenv("E2B_API_KEY", KEY)
    found = e2b_cloud()
    yield found
    assert found.machines == {}


def boxes(**options: object) -> E2bBoxes:
    return E2bBoxes(lifetime_s=99.5, **options)


def test_a_machine_has_no_internet_a_lease_and_a_lifetime_and_ends_with_its_box(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes(image="other").start(Start(files={"a": b"x" * 100_000}))
        ((_, machine),) = cloud.machines.items()
        assert machine.asked["templateID"] == "other"
        assert machine.asked["allow_internet_access"] is False
        assert machine.asked["metadata"] == {LABEL: str(own_lease())}
        assert machine.asked["timeout"] == 100
        assert await box.read("a", max_bytes=2**20) == b"x" * 100_000  # too long for an argument
        await box.write("b", b"y" * 2**21)
        assert await box.read("b", max_bytes=2**22) == b"y" * 2**21  # too long for an answer that is told
        assert KEY not in (await box.run(["env"], **OUTPUT)).stdout
        await box.run(["bash", "-c", "(exec -a e2b-left sleep 999) >/dev/null 2>&1 &"], **OUTPUT)
        with trio.fail_after(60):
            while not named("e2b-left"):
                await trio.sleep(0.01)
        await box.stop()
        await box.stop()
        assert named("e2b-left") == []
        with pytest.raises(BoxEnded, match="the box was stopped"):
            await box.run(["true"], **OUTPUT)

    trio.run(main)


def test_a_start_that_is_cancelled_while_its_machine_is_made_leaves_none(cloud: Cloud) -> None:
    async def main() -> None:
        cloud.creating.clear()
        cloud.may_create.clear()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(boxes().start, Start())
                await trio.to_thread.run_sync(cloud.creating.wait, 30)
                nursery.cancel_scope.cancel()
                cloud.may_create.set()
        finally:
            cloud.may_create.set()
        assert nursery.cancel_scope.cancelled_caught
        assert cloud.num_made == 1
        assert cloud.machines == {}

    cloud.num_made = 0
    trio.run(main)


def test_a_template_without_python_is_told_at_the_start(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.extras.boxes.machine_box.SERVANT", "raise SystemExit(127)")

    async def main() -> None:
        with pytest.raises(SandboxError, match=r"a machine needs python3, 3\.8 or newer"):
            await boxes().start(Start())

    trio.run(main)
    assert cloud.machines == {}


@pytest.mark.parametrize("refusals", [[429], [503, 429, 502]])
def test_what_the_cloud_asks_to_retry_is_retried(cloud: Cloud, refusals: list[int]) -> None:
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
        with pytest.raises(SandboxError, match=r"E2B: .*not now"):
            await boxes().start(Start())

    try:
        trio.run(main)
        assert cloud.refusals  # bounded
    finally:
        cloud.refusals = []


def test_a_template_that_is_not_there_is_the_rows_fault_and_a_wrong_key_is_not(cloud: Cloud) -> None:
    async def main() -> None:
        with pytest.raises(DataError, match="image 'mine': E2B has no such template"):
            await boxes().start(Start(image="mine"))
        with pytest.raises(SandboxError, match="the key is not known"):
            await boxes(api_key="e2b_9999").start(Start())

    trio.run(main)


def test_a_machine_that_is_lost_before_a_command_is_no_fault_of_the_attempt(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes().start(Start(files={"a": b"1"}))
        ((name, machine),) = cloud.machines.items()
        del cloud.machines[name]
        with pytest.raises(SandboxError, match="its files are gone"):
            await box.read("a", max_bytes=1)
        await box.stop()
        machine.end()

    trio.run(main)


def test_a_machine_that_is_gone_ends_its_box(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        await box.run(["true"], **OUTPUT)
        ((name, machine),) = cloud.machines.items()
        del cloud.machines[name]
        for _ in range(2):
            with pytest.raises(BoxEnded, match="the box is over, and its files are gone"):
                await box.run(["true"], **OUTPUT)
        await box.stop()
        machine.end()

    trio.run(main)


def test_a_machine_whose_lifetime_is_over_ends_its_box(cloud: Cloud) -> None:
    async def main() -> None:
        box = await E2bBoxes(lifetime_s=0.0).start(Start())
        await box.run(["true"], **OUTPUT)
        ((name, machine),) = cloud.machines.items()
        del cloud.machines[name]
        machine.end()
        with pytest.raises(BoxEnded, match="its files are gone: its lifetime is over"):
            await box.run(["true"], **OUTPUT)
        await box.stop()

    trio.run(main)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("running", "E2B: the machine runs, but is not reached"),
        ("paused", "E2B: the machine is paused before"),
    ],
)
def test_a_machine_that_e2b_does_not_reach_or_paused_is_no_fault_of_the_model(
    cloud: Cloud, state: str, text: str
) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        await box.run(["true"], **OUTPUT)
        ((name, _),) = cloud.machines.items()
        cloud.states[name] = state
        for _ in range(2):
            with pytest.raises(SandboxError, match=text):
                await box.run(["true"], **OUTPUT)
        await box.stop()

    trio.run(main)


@pytest.mark.parametrize("kills", ["kill -9 $PPID", "rm -rf ../work; kill -9 $PPID"])
def test_a_command_that_kills_its_servant_ends_the_box_and_breaks_nothing(cloud: Cloud, kills: str) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        with pytest.raises(BoxEnded, match="a command destroyed its answer"):
            await box.run(["bash", "-c", kills], **OUTPUT)
        assert cloud.machines == {}
        with pytest.raises(BoxEnded):
            await box.read("a", max_bytes=1)

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


def test_machines_whose_owner_has_ended_are_found_and_removed(cloud: Cloud) -> None:
    async def main() -> OpenBox:
        return await boxes().start(Start())

    box = trio.run(main)
    ((name, machine),) = cloud.machines.items()
    keeper = boxes()
    assert [(found.name, found.ownership) for found in keeper.found()] == [(name, "in use")]
    assert sweep(keeper) == []
    listed = CliRunner().invoke(app, ["boxes", "--cloud", "e2b"])
    assert f"{name}  in use" in listed.output
    lease = own_lease()
    machine.asked["metadata"][LABEL] = str(lease).replace(f"/{lease.pid}/", "/1/")
    removed = CliRunner().invoke(app, ["boxes", "--cloud", "e2b", "--remove"])
    assert f"{name}  removed" in removed.output
    assert cloud.machines == {}
    trio.run(box.stop)


def test_an_answer_that_a_command_removed_is_not_there(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        assert await trio.to_thread.run_sync(box._machine.read, "/tmp/no-such-answer") is None
        await box.stop()

    trio.run(main)


def test_the_tools_of_a_workspace_work_on_a_machine(cloud: Cloud) -> None:
    workspace = Workspace({"kind": "e2b", "image": "base", "lifetime_s": 60})

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
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="set the environment variable E2B_API_KEY"):
        boxes().check()
    with pytest.raises(ConfigError, match=r"api_key_env='NOT_SET': this environment variable is not set"):
        open_pool(WorkspaceOptions(kind="e2b", api_key_env="NOT_SET"))
    with pytest.raises(ValueError, match="no further writable folders"):
        WorkspaceOptions(kind="e2b", scratch=("/data",))
    both = CliRunner().invoke(app, ["boxes", "--cloud", "e2b", "--command", "podman"])
    assert "--command podman is of an engine" in str(both.exception)
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[e2b\]'"):
        boxes().check()
