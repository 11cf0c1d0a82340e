"""What the doctor says of a machine: judged from figures, and found with faults that the kernel plants."""

import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.compose import load_config
from agentrl.config.schema import Config
from agentrl.config.trainer import TrainerConfig
from agentrl.errors import DiskError
from agentrl.extras.doctor import clock, disks, interpreter, limits, memory, network, trackers, walls
from agentrl.extras.doctor.checks import CHECKS
from agentrl.extras.doctor.cpu_peak import read_peak
from agentrl.extras.doctor.diagnosis import Diagnosis
from agentrl.extras.doctor.disk_speed import SyncedFile, measure_disk
from agentrl.extras.doctor.examine import LAST_LINE
from agentrl.extras.doctor.file_locks import try_locks
from agentrl.extras.doctor.subject import Subject
from agentrl.extras.sandbox import WALLS, Protections
from agentrl.granted import Granted
from agentrl.ports import ReservedPort
from parts.refused_calls import refusing

GIB = 1 << 30
MODULES = {check.name: check.module for check in CHECKS}


def subject(folder, **sections):
    return Subject(Config(trainer=TrainerConfig(run_dir=str(folder)), **sections), is_given=True)


def diagnosed_without(call, name, given):
    """Run a check as `agentrl doctor` does, in a process that may not make a system call."""
    command = [sys.executable, "-m", "agentrl.extras.doctor", name, MODULES[name]]
    done = subprocess.run(
        [*refusing(call), *command], input=given.as_json(), capture_output=True, text=True, timeout=120
    )
    *lines, last = done.stdout.splitlines()
    assert last == LAST_LINE, done.stderr
    return {own.part: own for own in map(Diagnosis.parse, lines)}


# ---------------------------------------------------------------------------------------------------- memory


def grant(memory=32 * GIB, machine=32 * GIB):
    return Granted(4, "machine", 4, memory, "machine", machine)


@pytest.mark.parametrize(
    ("total", "free", "chosen", "verdict", "text"),
    [
        (16 * GIB, 16 * GIB, None, "ok", "the object store gets 9.6 GiB"),
        (16 * GIB, 16 * GIB, 12 * GIB, "ok", "the object store gets 12.0 GiB"),
        (4 * GIB, 4 * GIB, None, "slow", "on the disk"),
        (64 << 20, 64 << 20, None, "wrong", "it is full"),  # Docker's default
        (16 * GIB, 0, None, "wrong", "it is full"),
        (4 * GIB, 4 * GIB, 11 * GIB, "wrong", "Ray refuses to start"),
        (4 * GIB, 4 * GIB, 3 * GIB, "ok", "gets 3.0 GiB"),
    ],
)
def test_shared_memory_is_judged_as_ray_uses_it(total, free, chosen, verdict, text):
    found = memory.judge_shared_memory(total, free, chosen=chosen, grant=grant())
    assert (found.verdict, text in found.text) == (verdict, True), found
    assert ("--shm-size=" in found.cure) == (verdict != "ok")


def test_the_store_of_a_container_is_a_share_of_what_it_is_granted():
    found = memory.judge_shared_memory(2 * GIB, 2 * GIB, chosen=None, grant=grant(memory=4 * GIB))
    assert found.verdict == "ok"
    assert found.figures["object_store_bytes"] == int(0.3 * 4 * GIB)


def test_memory_is_judged_by_what_is_free_and_by_the_forecast_of_the_run():
    assert memory.judge_memory(grant(), 8 * GIB, None).verdict == "ok"
    assert memory.judge_memory(grant(), GIB, None).verdict == "slow"
    found = memory.judge_memory(grant(), 8 * GIB, "this run needs about 40 GiB")
    assert found.verdict == "wrong"
    assert "this run needs about 40 GiB" in found.text


@given(st.integers(1, 10**6), st.integers(1, 10**4))
def test_more_open_files_are_never_worse(hard, attempts):
    order = ["wrong", "slow", "ok"]
    less, more = (limits.judge_open_files(own, attempts).verdict for own in (hard, 2 * hard))
    assert order.index(less) <= order.index(more)
    assert limits.judge_open_files(resource.RLIM_INFINITY, attempts).verdict == "ok"
    assert limits.judge_open_files(attempts + 255, attempts).verdict == "wrong"
    assert limits.judge_open_files(attempts + 256, attempts).verdict != "wrong"


def test_few_processes_are_slow():
    assert limits.judge_processes([]).verdict == "ok"
    assert limits.judge_processes([100_000, 512]).verdict == "slow"


# ------------------------------------------------------------------------------------------------- processor


CPUINFO = "cpu family\t: {family}\nmodel name\t: A CPU\ncpu MHz\t\t: 2000.0\nflags\t\t: fpu {flags}\n"


@pytest.mark.parametrize(
    ("family", "flags", "gflops"),
    [
        (6, "avx fma avx2 avx512f", 128),
        (25, "avx fma avx2 avx512f", 64),
        (26, "avx fma avx2 avx512f", 128),
        (6, "avx fma avx2", 64),
        (6, "avx sse2", 32),
        (6, "sse2", 16),
    ],
)
def test_the_peak_of_a_core_is_width_times_clock(family, flags, gflops):
    text = CPUINFO.format(family=family, flags=flags)
    assert read_peak(text).flops_per_s == gflops * 1e9
    assert read_peak(text, "4000000\n").flops_per_s == 2 * gflops * 1e9


def test_an_unknown_processor_has_no_peak():
    assert read_peak("") is None
    assert read_peak("Features\t: fp asimd\n") is None, "its clock is not known"
    assert read_peak("Features\t: fp asimd\n", "3000000").flops_per_s == 48e9


# ----------------------------------------------------------------------------------------------------- disks


class PacedFile(SyncedFile):
    """A file on a disk that takes 20 MB/s, and 50 ms for a sync."""

    def write(self, data):
        time.sleep(len(data) / 20e6)
        return super().write(data)

    def sync(self):
        time.sleep(0.05)
        super().sync()


def test_a_slow_disk_is_slow(tmp_path):
    speed = measure_disk(tmp_path, PacedFile)
    assert speed.bytes_per_s <= 20e6
    assert speed.sync_s >= 0.05
    found = disks.judge_speed("run folder", tmp_path, speed)
    assert found.verdict == "slow"
    assert "checkpoints" in found.cure
    assert list(tmp_path.iterdir()) == []


def test_a_disk_with_slow_syncs_alone_is_slow(tmp_path):
    speed = disks.DiskSpeed(1e9, 0.1)
    assert "journal" in disks.judge_speed("run folder", tmp_path, speed).cure
    assert disks.judge_speed("run folder", tmp_path, disks.DiskSpeed(1e9, 0.001)).verdict == "ok"


class FullFile(SyncedFile):
    """A file on a full disk: Linux has one."""

    def __init__(self, path):
        super().__init__(Path("/dev/full"))


def test_a_full_disk_is_an_error_of_the_disk(tmp_path):
    with pytest.raises(DiskError, match="cannot be written: No space left on device"):
        measure_disk(tmp_path, FullFile)


def test_a_file_system_without_locks_is_wrong(tmp_path):
    found = diagnosed_without("flock", "disks", subject(tmp_path))
    assert found["locks"].verdict == "wrong"
    assert "cannot be locked (No locks available)" in found["locks"].text
    assert "mount it with them" in found["locks"].cure
    assert found["run folder"].verdict != "wrong"


def test_locks_hold_between_processes_here(tmp_path):
    assert try_locks(tmp_path).lock_problem is None
    assert try_locks(tmp_path).has_log
    assert list(tmp_path.iterdir()) == []


def test_space_is_judged_by_the_checkpoints_that_a_run_keeps(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert disks.judge_space("space", tmp_path, free // 2).verdict == "ok"
    assert disks.judge_space("space", tmp_path, 2 * free).verdict == "wrong"


def test_a_run_without_checkpoints_needs_no_space_for_them(monkeypatch, tmp_path):
    monkeypatch.setattr(Subject, "num_parameters", 10**15)
    for save_freq, verdict in ((1, "wrong"), (-1, "ok")):
        trainer = TrainerConfig(run_dir=str(tmp_path), save_freq=save_freq)
        given = Subject(Config(trainer=trainer), is_given=True)
        monkeypatch.setattr(disks, "LITTLE_BYTES", 0)
        space = {own.part: own for own in disks.diagnose(given)}["run folder space"]
        assert space.verdict == verdict, space


def test_a_node_examines_the_folders_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    weights = ["rollout.weights.folder=w"]
    sent = (
        Subject(load_config("quickstart", ["trainer.run_dir=r", *weights]), is_given=True)
        .anchored()
        .as_json()
    )
    bare = Subject(Config(), is_given=False).anchored().as_json()
    monkeypatch.chdir("/")  # Ray's processes work elsewhere
    assert Subject.parse(sent).run_folder == tmp_path / "r"
    assert Subject.parse(sent).weights_folder == tmp_path / "w"
    assert Subject.parse(bare).run_folder == tmp_path


# --------------------------------------------------------------------------------------------- clock, network


def test_a_clock_that_was_never_set_is_wrong():
    assert clock.judge_clock(0.0, True).verdict == "wrong"
    for state in (True, False, None):
        assert clock.judge_clock(1.8e9, state).verdict == "ok"


def test_files_with_another_time_are_told(tmp_path):
    assert clock.judge_file_time(tmp_path, 100.0, 101.0).verdict == "ok"
    assert clock.judge_file_time(tmp_path, 100.0, 200.0).verdict == "slow"


@pytest.mark.parametrize(
    ("environ", "verdict"),
    [
        ({}, "ok"),
        ({"HTTP_PROXY": "http://u:secret@proxy:1"}, "wrong"),
        ({"http_proxy": "http://u:secret@proxy:1", "no_proxy": "127.0.0.1"}, "wrong"),
        ({"http_proxy": "http://u:secret@proxy:1", "no_proxy": "127.0.0.1,localhost"}, "wrong"),
        ({"http_proxy": "http://u:secret@proxy:1", "no_proxy": "127.0.0.1,localhost,.cluster"}, "ok"),
        ({"https_proxy": "http://u:secret@proxy:1", "NO_PROXY": "*"}, "ok"),
    ],
)
def test_a_proxy_must_not_get_what_is_meant_for_parts_of_the_run(environ, verdict):
    found = network.judge_proxies(environ, ["node1.cluster"])
    assert found.verdict == verdict
    assert "secret" not in found.text + found.cure
    if verdict == "wrong":
        cured = {**environ, "no_proxy": found.cure.rpartition("=")[2]}
        assert network.judge_proxies(cured, ["node1.cluster"]).verdict == "ok"


def test_loopback_connects_and_few_ports_are_told():
    assert network.judge_ports("").verdict == "ok"
    assert network.judge_ports("32768\t60999\n").verdict == "ok"
    assert network.judge_ports("60000\t60999\n").verdict == "slow"


# ---------------------------------------------------------------------------------------------------- sandbox


def test_a_machine_without_namespaces_does_not_protect(tmp_path):
    found = diagnosed_without("unshare", "sandbox", Subject(Config(), is_given=False))["sandbox"]
    # As root without namespaces, programs run as another user, who may not see the interpreter.
    assert found.text.startswith(("not protected: ", "the sandbox failed at starting the interpreter"))
    assert found.verdict == "wrong"
    assert "CAP_SYS_ADMIN" in found.cure


def test_missing_walls_count_as_the_config_uses_them():
    missing = {"network": "a server was reached"}
    lacking = Protections(("memory",), missing, ())
    whole = Protections(WALLS, {}, ("namespaces",))

    def verdict(protections, **options):
        return walls.judge_walls(
            protections, **{"is_needed": True, "allowed": frozenset(), **options}
        ).verdict

    assert verdict(whole) == "ok"
    assert verdict(lacking) == "wrong"
    assert verdict(lacking, is_needed=False) == "slow"
    assert verdict(lacking, allowed=frozenset({"network"})) == "slow"
    assert verdict(lacking, allowed=frozenset({"disk"})) == "wrong"


def test_who_runs_programs_and_what_they_allow():
    quickstart = load_config("quickstart", [])
    assert not walls.runs_programs(quickstart)
    tool = load_config(
        "quickstart",
        ["agent.tools=[python]", "+agent.tool_config.python.allow_unprotected=[network, disk]"],
    )
    assert walls.runs_programs(tool)
    assert walls.runs_programs(load_config("quickstart", ["+reward.sources.mine=code"]))
    assert walls.allowed_walls(tool) == {"network", "disk"}
    both = load_config(
        "quickstart",
        [
            "+agent.tool_config.python.allow_unprotected=[network, disk]",
            "+reward.reward_config.code.allow_unprotected=[network]",
        ],
    )
    assert walls.allowed_walls(both) == {"network"}
    strict_reward = load_config(
        "quickstart",
        ["+agent.tool_config.python.allow_unprotected=[network]", "+reward.sources.mine=code"],
    )
    assert walls.allowed_walls(strict_reward) == set()


# ------------------------------------------------------------------------------------- packages and trackers


def test_packages_are_compared_with_what_is_required():
    assert interpreter.judge_packages(["numpy>=1", 'pytest<1; extra == "dev"']).verdict == "ok"
    found = interpreter.judge_packages(["numpy>=99", "no-such-package", "pytest>=1"])
    assert found.verdict == "wrong"
    assert "no-such-package is not installed" in found.text
    assert "agentrl needs >=99" in found.text
    assert found.cure == "pip install 'numpy>=99' 'no-such-package'"


def wandb_subject(mode):
    return Subject(load_config("quickstart", ["trainer.logger=[wandb]", f"tracking.wandb_mode={mode}"]), True)


def test_wandb_online_needs_a_key_and_a_service(monkeypatch, tmp_path):
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with ReservedPort() as port:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port.number}")
        [offline] = trackers.diagnose(wandb_subject("offline"))
        assert offline.verdict == "ok"
        [keyless] = trackers.diagnose(wandb_subject("online"))
        assert (keyless.verdict, "no key" in keyless.text) == ("wrong", True), keyless
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        [unreachable] = trackers.diagnose(wandb_subject("online"))
    assert unreachable.verdict == "wrong"
    assert "cannot be reached" in unreachable.text
    assert "a" * 40 not in unreachable.text


def test_mlflow_needs_its_package_and_its_server(monkeypatch):
    given = Subject(load_config("quickstart", ["trainer.logger=[mlflow]"]), True)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    [own] = trackers.diagnose(given)
    assert (own.verdict, own.text) == ("ok", "installed; writes to the run folder")
    with ReservedPort() as port:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://u:secret@127.0.0.1:{port.number}")
        [unreachable] = trackers.diagnose(given)
    assert (unreachable.verdict, "cannot be reached" in unreachable.text) == ("wrong", True), unreachable
    assert "secret" not in unreachable.text
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    [absent] = trackers.diagnose(given)
    assert (absent.verdict, absent.cure) == ("wrong", "pip install 'agentrl[mlflow]'")


def test_the_collector_of_spans_is_connected_to():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = load_config("quickstart", [f"tracking.spans.endpoint={url}"])
        given = Subject(config, True)
        [reached] = trackers.diagnose(given)
    assert (reached.part, reached.verdict) == ("spans", "ok")
    [gone] = trackers.diagnose(given)
    assert (gone.part, gone.verdict, "cannot be reached" in gone.text) == ("spans", "slow", True)
