"""Boxes of Modal: Modal's own client against a server of the tests with its protocol."""

from __future__ import annotations

import logging
import os
import re
import string
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio
import yaml
from grpclib import GRPCError, Status
from modal_proto import api_pb2
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import ConfigError, DataError, SandboxError
from agentrl.extras.boxes import BoxEnded, OpenBox, Start
from agentrl.extras.boxes.leases import own_lease, sweep
from agentrl.extras.boxes.modal import BEATS, ModalBoxes
from agentrl.extras.boxes.modal_cloud import WAITS_S
from agentrl.extras.boxes.options import WorkspaceOptions, open_pool
from agentrl.extras.boxes.workspace import Workspace
from parts.box_kinds import modal_cloud, named
from parts.modal_server import IMAGE_ID, PAGE, TOKEN, Cloud, Ended

OUTPUT = {"timeout_s": 60.0, "max_output_bytes": 10_000}
TRIES = len(WAITS_S) + 1


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Cloud:
    monkeypatch.setattr("agentrl.extras.boxes.modal_cloud.WAITS_S", (0.0,) * len(WAITS_S))
    monkeypatch.setattr("agentrl.extras.boxes.modal.LATE_S", (0.0,) * 5)
    found = modal_cloud()
    found.num_made = 0
    yield found
    assert found.machines == {}
    assert found.refusals == found.busy == []


def boxes(**options: object) -> ModalBoxes:
    return ModalBoxes(**({"app": "tests", "lifetime_s": 99.5, "idle_s": 300} | options))


def busy(*, wait_s: float | None = None) -> GRPCError:
    """Return the refusal of a service that has too many requests, which may say how long to wait."""
    details = None if wait_s is None else [api_pb2.RPCRetryPolicy(retry_after_secs=wait_s)]
    return GRPCError(Status.RESOURCE_EXHAUSTED, "not now", details)


def test_a_sandbox_has_no_network_a_lease_and_a_lifetime_and_ends_with_its_box(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes(image="python:3.12-slim").start(Start(files={"a": b"x" * 100_000}))
        ((_, machine),) = cloud.machines.items()
        asked = machine.asked["request"].definition
        assert asked.image_id == IMAGE_ID
        assert asked.network_access.network_access_type == api_pb2.NetworkAccess.BLOCKED
        assert (asked.timeout_secs, asked.idle_timeout_secs) == (100, 300)
        assert (asked.secret_ids, machine.asked["request"].secret_sources) == ([], [])
        assert await box.read("a", max_bytes=2**20) == b"x" * 100_000  # too long for an argument
        await box.write("b", b"y" * 2**21)
        assert await box.read("b", max_bytes=2**22) == b"y" * 2**21  # too long for an answer that is told
        assert "MODAL" not in (await box.run(["env"], **OUTPUT)).stdout.replace("CLOUD_MACHINE", "")
        done = await box.run(["sh", "-c", "echo out; echo err >&2"], **OUTPUT)
        assert (done.stdout, done.stderr) == ("out\n", "err\n")
        await box.run(["bash", "-c", "(exec -a modal-left sleep 999) >/dev/null 2>&1 &"], **OUTPUT)
        with trio.fail_after(60):
            while not named("modal-left"):
                await trio.sleep(0.01)
        await box.stop()
        await box.stop()
        assert named("modal-left") == []
        with pytest.raises(BoxEnded, match="the box was stopped"):
            await box.run(["true"], **OUTPUT)

    trio.run(main)


@pytest.mark.parametrize("size", [32 * 1024 - 200, 32 * 1024, 32 * 1024 + 1])
def test_a_request_as_long_as_an_argument_may_be_arrives(cloud: Cloud, size: int) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        await box.write("a", b"'" * size)
        assert await box.read("a", max_bytes=size) == b"'" * size
        await box.stop()

    trio.run(main)


def test_what_a_config_asks_for_is_asked_of_modal(cloud: Cloud) -> None:
    options = {"app": "mine", "region": "us-east", "cpus": 1.5, "internet": True, "idle_s": 60}
    pool = open_pool(WorkspaceOptions(kind="modal", memory_mib=512, modal=options))

    async def main() -> None:
        box = await pool.open(Start())
        ((_, machine),) = cloud.machines.items()
        asked = machine.asked["request"]
        assert asked.app_id == "ap-mine"
        resources = asked.definition.resources
        assert (resources.milli_cpu, resources.milli_cpu_max) == (1500, 1500)
        assert (resources.memory_mb, resources.memory_mb_max) == (512, 512)
        assert asked.definition.scheduler_placement.regions == ["us-east"]
        assert asked.definition.network_access.network_access_type == api_pb2.NetworkAccess.OPEN
        assert (asked.definition.timeout_secs, asked.definition.idle_timeout_secs) == (3600, 60)
        await pool.close(box)

    trio.run(main)


def test_a_start_that_is_cancelled_while_its_sandbox_is_made_leaves_none(cloud: Cloud) -> None:
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

    trio.run(main)


def test_a_start_that_is_cancelled_does_not_wait_for_its_image(cloud: Cloud) -> None:
    async def main() -> None:
        cloud.building.clear()
        cloud.may_build.clear()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(boxes().start, Start())
                await trio.to_thread.run_sync(cloud.building.wait, 30)
                nursery.cancel_scope.cancel()
            assert not cloud.may_build.is_set()
        finally:
            cloud.may_build.set()
        assert cloud.num_made == 0

    trio.run(main)


def test_a_start_that_modal_never_answers_is_given_up_and_leaves_no_sandbox(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.extras.boxes.modal.START_S", 2.0)

    async def main() -> None:
        cloud.refusals = [busy(wait_s=0.1) for _ in range(1000)]  # the client waits as long as it is told
        with pytest.raises(SandboxError, match="Modal: no answer within 2 s"):
            await boxes().start(Start())
        assert cloud.refusals
        cloud.refusals = []

    trio.run(main)


def test_a_sandbox_whose_making_was_not_answered_is_removed(cloud: Cloud) -> None:
    async def main() -> None:
        cloud.num_lost_answers = 1
        box = await boxes().start(Start())
        assert cloud.num_made == 2
        assert len(cloud.machines) == 1
        await box.stop()

    trio.run(main)


def test_an_image_without_python_is_told_at_the_start(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.extras.boxes.machine_box.SERVANT", "raise SystemExit(127)")

    async def main() -> None:
        with pytest.raises(SandboxError, match=r"a machine needs python3, 3\.8 or newer"):
            await boxes().start(Start())

    trio.run(main)


@pytest.mark.parametrize(
    "refusals",
    [
        [busy(wait_s=0.1), busy(wait_s=0.1)],
        [busy(), busy(wait_s=0.1), busy()],
        [GRPCError(Status.UNAVAILABLE, "not now")] * 6,  # the client asks four times
    ],
)
def test_a_start_is_tried_again_as_long_as_modal_is_busy_or_broken(
    cloud: Cloud, refusals: list[GRPCError]
) -> None:
    async def main() -> None:
        cloud.refusals = list(refusals)
        box = await boxes().start(Start())
        assert cloud.refusals == []
        assert cloud.num_made == 1
        await box.stop()

    trio.run(main)


@pytest.mark.parametrize(
    ("refusal", "num_tries"), [(busy(), TRIES), (GRPCError(Status.PERMISSION_DENIED, "not now"), 1)]
)
def test_a_cloud_that_keeps_refusing_is_no_fault_of_the_row(
    cloud: Cloud, refusal: GRPCError, num_tries: int
) -> None:
    async def main() -> None:
        cloud.refusals = [refusal] * 20
        with pytest.raises(SandboxError, match=r"Modal: not now"):
            await boxes().start(Start(image=IMAGE_ID))
        assert 20 - len(cloud.refusals) == num_tries
        cloud.refusals = []

    trio.run(main)


def test_a_command_is_sent_again_only_if_it_was_not_run(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        cloud.busy = [busy(), busy(wait_s=0.1)]
        await box.run(["sh", "-c", "echo once >> a"], **OUTPUT)
        assert await box.read("a", max_bytes=100) == b"once\n"
        cloud.busy = [GRPCError(Status.PERMISSION_DENIED, "not now")]
        with pytest.raises(SandboxError, match=r"Modal: not now"):
            await box.run(["true"], **OUTPUT)
        await box.stop()

    trio.run(main)


def test_an_image_that_is_not_there_is_the_rows_fault_and_a_wrong_token_is_not(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        with pytest.raises(DataError, match=r"image 'mine': Modal: .*manifest unknown"):
            await boxes().start(Start(image="mine"))
        with pytest.raises(DataError, match=r"image 'im-9': Modal: Image im-9 not found"):
            await boxes(image="im-9").start(Start())
        monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-wrong")
        with pytest.raises(SandboxError, match="the token is not known"):
            await boxes().start(Start())

    trio.run(main)


@pytest.mark.parametrize(
    ("status", "exit_code", "error", "text"),
    [
        (Ended.GENERIC_STATUS_TERMINATED, 0, SandboxError, "lost: it was terminated from outside"),
        (Ended.GENERIC_STATUS_INTERNAL_FAILURE, 0, SandboxError, "lost: Modal ended it before its time"),
        (Ended.GENERIC_STATUS_IDLE_TIMEOUT, 0, SandboxError, "lost: Modal ended it before its time"),
        (Ended.GENERIC_STATUS_TIMEOUT, 0, BoxEnded, "files are gone: its lifetime is over"),
        (Ended.GENERIC_STATUS_FAILURE, 143, BoxEnded, "gone: its first process ended with exit code 143"),
        (Ended.GENERIC_STATUS_KERNEL_OOM_KILL, 137, BoxEnded, "gone: its first process ended with"),
    ],
)
def test_how_a_sandbox_ended_decides_whose_fault_it_is(
    cloud: Cloud, status: int, exit_code: int, error: type[Exception], text: str
) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        ((name, _),) = cloud.machines.items()

        async def end() -> None:
            while not named(f"modal-busy-{status}"):
                await trio.sleep(0.01)
            await trio.to_thread.run_sync(cloud.end, name, status, exit_code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(end)
            with pytest.raises(error, match=text):
                await box.run(["bash", "-c", f"exec -a modal-busy-{status} sleep 999"], **OUTPUT)
        with pytest.raises(error, match=text):  # and stays so
            await box.read("a", max_bytes=10)
        await box.stop()

    trio.run(main)


@pytest.mark.parametrize(("num_late", "error"), [(4, BoxEnded), (9, SandboxError)])
def test_modal_may_tell_later_how_a_sandbox_ended(
    cloud: Cloud, num_late: int, error: type[Exception]
) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        await box.run(["true"], **OUTPUT)
        ((name, _),) = cloud.machines.items()
        cloud.end(name, Ended.GENERIC_STATUS_FAILURE, 137)
        cloud.num_late = num_late
        with pytest.raises(error):
            await box.run(["true"], **OUTPUT)
        cloud.num_late = 0
        await box.stop()

    trio.run(main)


def test_a_sandbox_that_modal_does_not_know_is_lost_until_its_lifetime_is_over(cloud: Cloud) -> None:
    async def main() -> None:
        for lifetime_s, error, text in (
            (99.5, SandboxError, "lost: Modal does not know"),
            (0.0, BoxEnded, "does not know"),
        ):
            box = await boxes(lifetime_s=lifetime_s).start(Start())
            await box.run(["true"], **OUTPUT)
            ((name, machine),) = cloud.machines.items()
            del cloud.machines[name]
            machine.end()
            with pytest.raises(error, match=text):
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


def test_a_sandbox_gets_signs_of_life_until_its_box_is_stopped(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes(idle_s=0.1 * BEATS).start(Start())
        ((name, _),) = cloud.machines.items()
        cloud.beats.clear()
        while cloud.beats.count(name) < 3:
            await trio.sleep(0.01)
        await box.stop()
        other = await boxes(idle_s=0.1 * BEATS).start(Start())
        ((other_name, _),) = cloud.machines.items()
        cloud.beats.clear()
        while cloud.beats.count(other_name) < 3:
            await trio.sleep(0.01)
        assert name not in cloud.beats
        await other.stop()

    trio.run(main)


def test_a_box_that_was_stopped_keeps_no_connection(cloud: Cloud) -> None:
    async def main() -> None:
        maker = boxes()
        counts = []
        for _ in range(3):
            box = await maker.start(Start())
            await box.run(["true"], **OUTPUT)
            counts.append(len(os.listdir("/proc/self/fd")))
            await box.stop()
        with trio.fail_after(20):
            while len(os.listdir("/proc/self/fd")) >= min(counts):
                await trio.sleep(0.01)

    trio.run(main)


OWNER = """
import trio
from agentrl.extras.boxes import Start
from agentrl.extras.boxes.modal import ModalBoxes

async def main():
    box = await ModalBoxes(app="tests", lifetime_s=3600, idle_s=1).start(Start())
    await box.run(["bash", "-c", "(exec -a modal-owned sleep 999) >/dev/null 2>&1 &"],
                  timeout_s=60, max_output_bytes=100)
    print("ready", flush=True)
    await trio.sleep_forever()

trio.run(main)
"""


def test_nothing_is_left_of_an_owner_that_was_killed(cloud: Cloud) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        ((name, _),) = cloud.machines.items()
        cloud.beats.clear()
        while cloud.beats.count(name) < 2:  # it lives, however long the model thinks
            time.sleep(0.01)
        owner.kill()
        owner.wait()
    assert named("modal-owned")
    assert [(found.name, found.ownership) for found in boxes().found()] == [(name, "nobody's")]
    while cloud.machines:
        cloud.end_idle()
        time.sleep(0.01)
    assert cloud.ends[name].status == Ended.GENERIC_STATUS_IDLE_TIMEOUT
    assert named("modal-owned") == []


def test_sandboxes_whose_owner_has_ended_are_found_and_removed(cloud: Cloud) -> None:
    async def main() -> list[OpenBox]:
        return [await boxes().start(Start()) for _ in range(PAGE + 1)]

    assert boxes(app="unused").found() == []
    opened = trio.run(main)
    keeper = boxes()
    assert {(one.name, one.ownership) for one in keeper.found()} == {
        (name, "in use") for name in cloud.machines
    }
    assert {one.lease for one in keeper.found()} == {str(own_lease())}
    assert sweep(keeper) == []
    name, machine = list(cloud.machines.items())[-1]
    (pid,) = [tag for tag in machine.asked["request"].tags if tag.tag_name == "agentrl.pid"]
    pid.tag_value = "1"
    listed = CliRunner().invoke(app, ["boxes", "--cloud", "modal", "--app", "tests"])
    assert listed.exit_code == 1
    assert f"{name}  nobody's" in listed.output
    removed = CliRunner().invoke(app, ["boxes", "--cloud", "modal", "--app", "tests", "--remove"])
    assert f"{name}  removed" in removed.output
    assert len(cloud.machines) == PAGE
    keeper.end(name)  # that has gone
    assert "no boxes" in CliRunner().invoke(app, ["boxes", "--cloud", "modal"]).output
    for box in opened:
        trio.run(box.stop)


def test_the_parts_of_a_lease_are_tags_as_modal_takes_them(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        ((_, machine),) = cloud.machines.items()
        for tag in machine.asked["request"].tags:
            for text in (tag.tag_name, tag.tag_value):
                assert len(text) <= 63
                assert set(text) <= set(string.ascii_letters + string.digits + "._-")
        await box.stop()

    trio.run(main)


def test_the_token_is_in_no_log(cloud: Cloud, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("modal-client").setLevel(logging.DEBUG)

    async def main() -> None:
        box = await boxes().start(Start())
        cloud.busy = [GRPCError(Status.PERMISSION_DENIED, "not now")]
        with pytest.raises(SandboxError) as refused:
            await box.run(["true"], **OUTPUT)
        assert not any(secret in str(refused.value) for secret in TOKEN.values())
        await box.stop()

    try:
        trio.run(main)
    finally:
        logging.getLogger("modal-client").setLevel(logging.WARNING)
    assert caplog.records
    assert not any(secret in caplog.text for secret in TOKEN.values())


def test_an_answer_that_a_command_removed_is_not_there(cloud: Cloud) -> None:
    async def main() -> None:
        box = await boxes().start(Start())
        assert await trio.to_thread.run_sync(box._machine.read, "/tmp/no-such-answer") is None
        await box.stop()

    trio.run(main)


def test_the_tools_of_a_workspace_work_on_a_sandbox(cloud: Cloud) -> None:
    workspace = Workspace({"kind": "modal", "image": "python:3.12-slim", "lifetime_s": 60})

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


def test_the_example_of_the_page_starts_boxes(cloud: Cloud) -> None:
    page = (Path(__file__).parents[3] / "agentrl/extras/boxes/README.md").read_text(encoding="utf-8")
    (example,) = [
        block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "kind: modal" in block
    ]
    config = yaml.safe_load(example)["agent"]["environment_config"]["workspace"]

    async def main() -> None:
        workspace = Workspace(config)
        await workspace.start(files={"a.txt": "one\n"})
        assert (await workspace.bash("cat a.txt")).text == "one"
        await workspace.close()

    trio.run(main)


def test_bad_options_are_answered_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TOKEN:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="no token: MODAL_TOKEN_ID and MODAL_TOKEN_SECRET must"):
        boxes().check()
    monkeypatch.setenv("MODAL_TOKEN_ID", TOKEN["MODAL_TOKEN_ID"])
    with pytest.raises(ConfigError, match="no token: MODAL_TOKEN_SECRET must be set"):
        boxes().check()
    with pytest.raises(ValueError, match="kind 'modal' has no api_key_env"):
        WorkspaceOptions(kind="modal", api_key_env="KEY")
    with pytest.raises(ValueError, match="no further writable folders"):
        WorkspaceOptions(kind="modal", scratch=("/data",))
    wrong = CliRunner().invoke(app, ["boxes", "--cloud", "e2b", "--app", "mine"])
    assert "--app mine is of Modal: give --cloud modal, too" in str(wrong.exception)
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[modal\]'"):
        boxes().check()
