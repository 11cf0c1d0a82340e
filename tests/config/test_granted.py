"""What a process may use: machines written by hand, of both kinds of control groups, with SLURM's
variables.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.cluster.cluster import object_store_bytes
from agentrl.config.cluster import MIN_OBJECT_STORE_BYTES
from agentrl.granted import Granted, granted

GIB = 1 << 30
MEMINFO = "MemTotal:       268435456 kB\nMemFree:        1 kB\n"  # 256 GiB


def machine(root: Path, *, groups: str, mounts: list[str], files: dict[str, str]) -> Path:
    """Write a machine's /proc and control groups below `root`."""
    mountinfo = "".join(f"{30 + i} 23 0:{28 + i} {mount}\n" for i, mount in enumerate(mounts))
    for name, text in {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mountinfo,
        "proc/meminfo": MEMINFO,
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


UNIFIED = "/ /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def look(root: Path, environ: dict[str, str] | None = None, *, affinity: int = 64) -> Granted:
    return granted(root, environ or {}, machine_cpus=64, affinity=affinity)


def test_a_pod_sees_its_own_group_as_the_root_of_the_hierarchy(tmp_path):
    files = {"sys/fs/cgroup/cpu.max": "250000 100000\n", "sys/fs/cgroup/memory.max": f"{8 * GIB}\n"}
    found = look(machine(tmp_path, groups="0::/\n", mounts=[UNIFIED], files=files))
    assert found == Granted(2, "cgroup", 64, 8 * GIB, "cgroup", 256 * GIB)  # two and a half are two


def test_a_group_far_above_binds(tmp_path):
    files = {
        "sys/fs/cgroup/system.slice/job/step/cpu.max": "max 100000\n",
        "sys/fs/cgroup/system.slice/job/cpu.max": "1600000 100000\n",
        "sys/fs/cgroup/system.slice/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/system.slice/job/memory.max": f"{32 * GIB}\n",
        "sys/fs/cgroup/user.slice/cpu.max": "100000 100000\n",  # of others
    }
    found = look(machine(tmp_path, groups="0::/system.slice/job/step\n", mounts=[UNIFIED], files=files))
    assert (found.num_cpus, found.memory_bytes) == (4, 32 * GIB)


@pytest.mark.parametrize("top", ["/", "/docker/abc"], ids=["all of the hierarchy", "a part of it"])
def test_the_first_version_of_control_groups(tmp_path, top):
    below = "docker/abc/" if top == "/" else ""
    files = {
        f"sys/fs/cgroup/cpu,cpuacct/{below}cpu.cfs_quota_us": "300000",
        f"sys/fs/cgroup/cpu,cpuacct/{below}cpu.cfs_period_us": "100000",
        f"sys/fs/cgroup/my memory/{below}memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/cpu,cpuacct/cpu.rt_period_us": "1",
    }
    if top == "/":  # no bound, as the kernel writes it
        files |= {
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/my memory/memory.limit_in_bytes": "9223372036854771712",
        }
    groups = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n0::/\n"
    mounts = [
        f"{top} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct",
        f"{top} /sys/fs/cgroup/my\\040memory rw - cgroup cgroup rw,memory",
    ]
    found = look(machine(tmp_path, groups=groups, mounts=mounts, files=files))
    assert found == Granted(3, "cgroup", 64, 4 * GIB, "cgroup", 256 * GIB)


def test_nothing_bounds_a_machine_of_ones_own(tmp_path):
    root = machine(
        tmp_path,
        groups="0::/user.slice\n",
        mounts=[UNIFIED],
        files={"sys/fs/cgroup/user.slice/cpu.max": "max 100000\n"},
    )
    assert look(root) == Granted(64, "machine", 64, 256 * GIB, "machine", 256 * GIB)


def test_a_share_below_one_is_one(tmp_path):
    root = machine(
        tmp_path, groups="0::/\n", mounts=[UNIFIED], files={"sys/fs/cgroup/cpu.max": "50000 100000\n"}
    )
    assert (look(root).num_cpus, look(root).cpu_source) == (1, "cgroup")


@pytest.mark.parametrize(
    ("environ", "num_cpus", "memory_bytes"),
    [
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_MEM_PER_NODE": "65536"}, 16, 64 * GIB),
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_CPUS_PER_TASK": "8", "SLURM_MEM_PER_CPU": "2048"}, 8, 32 * GIB),
        ({"SLURM_MEM_PER_CPU": "1024"}, 40, 40 * GIB),
        (
            {"SLURM_CPUS_ON_NODE": "0", "SLURM_CPUS_PER_TASK": "many", "SLURM_MEM_PER_NODE": "0"},
            40,
            256 * GIB,
        ),  # 0 is all of it
    ],
)
def test_what_slurm_gave(tmp_path, environ, num_cpus, memory_bytes):
    found = look(machine(tmp_path, groups="0::/\n", mounts=[UNIFIED], files={}), environ, affinity=40)
    assert (found.num_cpus, found.memory_bytes) == (num_cpus, memory_bytes)


@settings(max_examples=25)
@given(
    quotas=st.lists(st.none() | st.integers(1_000, 12_800_000), min_size=1, max_size=4),
    limits=st.lists(st.none() | st.integers(4096, 1 << 40), min_size=1, max_size=4),
    affinity=st.integers(1, 64),
    slurm=st.none() | st.integers(1, 128),
)
def test_the_least_bound_wins_wherever_it_stands(quotas, limits, affinity, slurm):
    with TemporaryDirectory() as folder:
        depth = max(len(quotas), len(limits))
        path = "/".join(f"level{i}" for i in range(depth))
        files = {f"sys/fs/cgroup/{path}/cgroup.procs": ""}
        for i, quota in enumerate(quotas):
            files["/".join(["sys/fs/cgroup", *path.split("/")[: i + 1], "cpu.max"])] = (
                f"{'max' if quota is None else quota} 100000\n"
            )
        for i, limit in enumerate(limits):
            files["/".join(["sys/fs/cgroup", *path.split("/")[: i + 1], "memory.max"])] = (
                f"{'max' if limit is None else limit}\n"
            )
        root = machine(Path(folder), groups=f"0::/{path}\n", mounts=[UNIFIED], files=files)
        found = look(root, {} if slurm is None else {"SLURM_CPUS_PER_TASK": str(slurm)}, affinity=affinity)
    bounds = [
        64,
        affinity,
        *([slurm] if slurm else []),
        *(quota // 100_000 for quota in quotas if quota is not None),
    ]
    assert found.num_cpus == max(1, min(bounds))
    assert found.memory_bytes == min([256 * GIB, *(limit for limit in limits if limit is not None)])


@given(memory=st.integers(1, 256 * GIB), free=st.integers(0, 300 * GIB))
def test_the_object_store_fits_into_what_is_granted(memory, free):
    size = store_of(memory, free)
    if memory == 256 * GIB:
        assert size is None
    elif size == MIN_OBJECT_STORE_BYTES:
        assert min(0.3 * memory, 0.95 * free) < size + 1
    else:
        assert size > MIN_OBJECT_STORE_BYTES
        assert size <= 0.3 * memory
        assert size < free
        assert size > min(0.3 * memory, 0.95 * free) - 1, "what fits is used"


def store_of(memory: int, free: int) -> int | None:
    return object_store_bytes(Granted(2, "machine", 2, memory, "cgroup", 256 * GIB), free)


def test_the_object_store_is_a_share_of_what_is_granted():
    assert store_of(10 * GIB, 100 * GIB) == 3 * GIB
    assert store_of(100 * GIB, 100 * GIB) == 30 * GIB
    assert store_of(100 * GIB, 20 * GIB) == 19 * GIB
    assert store_of(GIB // 8, 100 * GIB) == store_of(100 * GIB, 0) == MIN_OBJECT_STORE_BYTES
    assert store_of(256 * GIB, 20 * GIB) is None
