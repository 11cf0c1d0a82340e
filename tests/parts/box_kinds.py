"""Each back end of boxes that works on this machine, for tests that hold for all of them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.extras.boxes import BoxMaker
from agentrl.extras.boxes.bubblewrap import BubblewrapBoxes
from agentrl.extras.boxes.container import ContainerBoxes, limit_of_processes
from agentrl.extras.boxes.daytona import DaytonaBoxes
from agentrl.extras.boxes.e2b import E2bBoxes
from agentrl.extras.boxes.fusion import FusionBoxes
from agentrl.extras.boxes.modal import ModalBoxes
from agentrl.extras.boxes.process_box import ProcessBoxes
from agentrl.extras.sandbox import Limits, Sandbox, SandboxOptions
from parts.daytona_server import KEY as DAYTONA_KEY
from parts.daytona_server import Cloud as DaytonaCloud
from parts.daytona_server import daytona_server
from parts.e2b_server import KEY as E2B_KEY
from parts.e2b_server import Cloud, e2b_server
from parts.fusion_server import KEY, fusion_server
from parts.modal_server import TOKEN as MODAL_TOKEN
from parts.modal_server import Cloud as ModalCloud
from parts.modal_server import modal_server
from parts.root_file_system import can_be_made, make_root

LIMITS = Limits(
    wall_s=300.0, cpu_s=60.0, memory_mib=1024, max_processes=64, file_mib=64, disk_mib=64, max_open_files=512
)
IMAGE = "agentrl-test:latest"
BUBBLEWRAP_IS_HERE = shutil.which("bwrap") is not None


@functools.cache
def scratch() -> Path:
    """Return a folder of this test process, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="agentrl-boxes-"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def root() -> Path:
    """Return the folder of an image with /testbed."""
    return make_root(scratch() / "image", {"testbed/a.txt": "of the image\n"})


@functools.cache
def podman_command() -> tuple[str, ...]:
    """Return podman with a store of its own."""
    store = scratch() / "podman"
    return (
        *("podman", "--root", f"{store}/root", "--runroot", f"{store}/run"),
        *("--cgroup-manager", "cgroupfs", "--runtime", "runc"),
    )


@functools.cache
def why_no_podman() -> str:
    """Return why podman cannot run a container of the test's image here, "" if it can."""
    if shutil.which("podman") is None or shutil.which("runc") is None:
        return "podman and runc are not installed"
    if not can_be_made():
        return "this machine has no /usr/bin/python3 to make an image of"
    with subprocess.Popen(["tar", "-C", str(root()), "-cf", "-", "."], stdout=subprocess.PIPE) as packed:
        done = subprocess.run(
            [*podman_command(), "import", "-", IMAGE],
            stdin=packed.stdout,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == 0:
        limits = ("--ulimit", "nofile=512:512", *limit_of_processes())
        tried = [*podman_command(), "run", "--rm", "--network", "none", *limits, IMAGE, "/usr/bin/true"]
        done = subprocess.run(tried, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"podman does not work here: {done.stderr.strip()[-200:]}"


def process() -> BoxMaker:
    return ProcessBoxes(Sandbox(SandboxOptions(LIMITS)))


def bubblewrap() -> BoxMaker:
    if not BUBBLEWRAP_IS_HERE:
        pytest.skip("bubblewrap is not installed")
    return BubblewrapBoxes(LIMITS)


def bubblewrap_image() -> BoxMaker:
    if not BUBBLEWRAP_IS_HERE or not can_be_made():
        pytest.skip("bubblewrap is not installed, or there is no /usr/bin/python3 to make an image of")
    return BubblewrapBoxes(LIMITS, image=str(root()))


def podman() -> BoxMaker:
    if why := why_no_podman():
        pytest.skip(why)
    return ContainerBoxes(LIMITS, command=podman_command(), image=IMAGE)


def fusion() -> BoxMaker:
    server = contextlib.ExitStack()
    url = server.enter_context(fusion_server())
    atexit.register(server.close)
    return FusionBoxes(url, disk_mib=LIMITS.disk_mib, api_key=KEY)


@functools.cache
def e2b_cloud() -> Cloud:
    """Return the cloud of this test process, which E2B's client finds by its environment."""
    server = contextlib.ExitStack()
    url, cloud = server.enter_context(e2b_server())
    atexit.register(server.close)
    os.environ |= {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_HTTP_VERSION": "1.1"}
    return cloud


def e2b() -> BoxMaker:
    e2b_cloud()
    return E2bBoxes(lifetime_s=300, api_key=E2B_KEY)


@functools.cache
def daytona_cloud() -> DaytonaCloud:
    """Return the cloud of this test process, which Daytona's client finds by its environment."""
    server = contextlib.ExitStack()
    url, cloud = server.enter_context(daytona_server())
    atexit.register(server.close)
    os.environ |= {"DAYTONA_API_URL": url, "DAYTONA_TARGET": "us"}
    return cloud


def daytona() -> BoxMaker:
    daytona_cloud()
    return DaytonaBoxes(lifetime_s=300, api_key=DAYTONA_KEY)


@functools.cache
def modal_cloud() -> ModalCloud:
    """Return the cloud of this test process, which Modal's client finds by its environment."""
    server = contextlib.ExitStack()
    url, cloud = server.enter_context(modal_server())
    atexit.register(server.close)
    os.environ |= {"MODAL_SERVER_URL": url, "MODAL_CONFIG_PATH": os.devnull, **MODAL_TOKEN}
    return cloud


def modal() -> BoxMaker:
    modal_cloud()
    return ModalBoxes(app="tests", lifetime_s=300, idle_s=300)


LIVING: dict[str, Callable[[], BoxMaker]] = {
    "process": process,
    "bubblewrap": bubblewrap,
    "bubblewrap_image": bubblewrap_image,
    "podman": podman,
}
"""Those in which processes outlive their command."""
MAKERS = {**LIVING, "fusion": fusion, "e2b": e2b, "daytona": daytona, "modal": modal}


def named(name: str) -> list[str]:
    """Return the processes with this name as their first argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(name.encode()):
                found.append(path.parent.name)
        except OSError:
            continue
    return found
