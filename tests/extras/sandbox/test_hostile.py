"""Hostile programs against the sandbox, with the host as root and as a plain user, with namespaces and
without: all contained.

Each world is a process of its own that plays all programs; the tests look at what it reports and at the host.
Where the tests themselves do not run as root, nobody can become root: then the worlds of root are played by
the same user instead, which the report names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
IS_ROOT = os.geteuid() == 0
USER = 54321
"""A user id without an account."""

LIMITS = {
    "cpu_s": 1.0,
    "wall_s": 2.5,
    "memory_mib": 384,
    "max_processes": 16,
    "output_kib": 64,
    "file_mib": 8,
    "disk_mib": 32,
    "max_files": 500,
}
WALLS = ("filesystem", "network", "processes", "privileges", "memory", "process_count", "disk")
PACKAGES = ("trio", "attr", "attrs", "outcome", "sortedcontainers", "idna", "sniffio")

# name: (as root, what a container runtime took from the host, which walls may be missing, what the report
# says)
WORLDS = {
    "root": (True, [], [], "namespaces, as root"),
    "user": (False, [], [], "user namespace"),
    "container_root": (
        True,
        ["CAP_SYS_ADMIN", "unshare"],
        ["disk"],
        "no namespaces: not permitted, a user id of its own",
    ),
    "user_without_namespaces": (False, ["unshare"], ["disk"], "no namespaces: Operation not permitted"),
}


def load_programs() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("hostile_programs", HERE / "hostile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.programs()


PROGRAMS = load_programs()


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter; pytest keeps its own temporary folders to one."""
    folder = Path(tempfile.mkdtemp(prefix="agentrl-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def runtime(open_folder) -> SimpleNamespace:
    """An interpreter, and of the packages what the sandbox needs, where every user can read them."""
    folder = open_folder / "runtime"
    folder.mkdir()
    base, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
    ignored = shutil.ignore_patterns(
        "test", "site-packages", "dist-packages", "idlelib", "ensurepip", "__pycache__"
    )
    shutil.copytree(
        base / "lib" / version,
        folder / "python/lib" / version,
        copy_function=link_or_copy,
        symlinks=True,
        ignore=ignored,
    )
    (folder / "python/bin").mkdir()
    python = folder / "python/bin" / version
    link_or_copy(os.path.realpath(sys._base_executable), str(python))
    for library in (base / "lib").glob("libpython*"):
        link_or_copy(str(library), str(folder / "python/lib" / library.name))
    site = folder / "python/lib" / version / "site-packages"
    for package in PACKAGES:
        shutil.copytree(Path(sysconfig.get_path("purelib")) / package, site / package)
    shutil.copytree(
        ROOT / "agentrl/extras/sandbox",
        site / "agentrl/extras/sandbox",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for module in (ROOT / "agentrl").glob("*.py"):
        shutil.copy(module, site / "agentrl" / module.name)
    driver = folder / "driver.py"
    shutil.copy(HERE / "driver.py", driver)
    return SimpleNamespace(python=python, driver=driver, libraries=folder / "python/lib")


class Bait:
    """What a host has that programs must not reach: files, servers, a process, a secret in its
    environment.
    """

    def __init__(self, folder: Path, user: int) -> None:
        self.nonce = f"hostile-{secrets.token_hex(8)}"
        self.secret = secrets.token_hex(16)
        self.folder = folder / "open"
        self.home = folder / "home"
        self.temporary = folder / "tmp"
        for path in (self.folder, self.home, self.temporary):
            path.mkdir(parents=True)
            os.chown(path, user, user) if IS_ROOT else None
        self.folder.chmod(0o777)
        self.file = self.folder / "file"
        self.file.write_text("untouched")
        self.file.chmod(0o666)
        self.facts = self.look()
        self.reached: list[str] = []
        self._servers: list[socket.socket] = []
        self.canary: subprocess.Popen[bytes] | None = None

    def open(self, user: int) -> dict[str, object]:
        tcp = self._serve(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0))
        udp = self._serve(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0))
        path = str(self.folder.parent / "s")
        self._serve(socket.AF_UNIX, socket.SOCK_STREAM, path)
        os.chmod(path, 0o777)
        self._serve(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.nonce)
        identity = {"user": user, "group": user, "extra_groups": []} if IS_ROOT else {}
        self.canary = subprocess.Popen(["sleep", "1000"], start_new_session=True, **identity)
        return {
            "nonce": self.nonce,
            "secret": self.secret,
            "folder": str(self.folder),
            "file": str(self.file),
            "home": str(self.home),
            "project": str(ROOT),
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "unix": path,
            "abstract": self.nonce,
            "canary": self.canary.pid,
        }

    def look(self) -> list[tuple[int, int, list[str]]]:
        """Return permissions, time of change and attributes of what is out."""
        found = [(path, path.stat()) for path in (self.file, self.folder, self.home)]
        return [(stat.st_mode, stat.st_mtime_ns, os.listxattr(path)) for path, stat in found]

    def close(self) -> None:
        for server in self._servers:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        if self.canary is not None:
            self.canary.kill()
            self.canary.wait()

    def _serve(self, family: int, kind: int, address: object) -> socket.socket:
        server = socket.socket(family, kind)
        self._servers.append(server)
        server.bind(address)
        if kind == socket.SOCK_STREAM:
            server.listen()
        threading.Thread(target=self._note, args=(server, kind, str(address)), daemon=True).start()
        return server

    def _note(self, server: socket.socket, kind: int, name: str) -> None:
        with contextlib.suppress(OSError):
            while True:
                server.accept() if kind == socket.SOCK_STREAM else server.recvfrom(100)
                if not self._servers or server.fileno() < 0:
                    return
                self.reached.append(name)


@pytest.fixture(scope="module", params=list(WORLDS))
def world(request, runtime, open_folder) -> Iterator[SimpleNamespace]:
    """All programs played in one world: what the driver reports, and the bait that was out meanwhile."""
    with played(request.param, WORLDS[request.param], PROGRAMS, runtime, open_folder) as found:
        yield found


@contextlib.contextmanager
def played(
    name: str, world: tuple, programs: dict, runtime: SimpleNamespace, open_folder: Path
) -> Iterator[SimpleNamespace]:
    as_root, missing, allow, _ = world
    user = 0 if as_root or not IS_ROOT else USER
    taken = (
        missing if IS_ROOT else [name for name in missing if name != "CAP_SYS_ADMIN"]
    )  # what a user does not have anyway
    folder = open_folder / name
    folder.mkdir()
    bait = Bait(folder, user if IS_ROOT else os.geteuid())
    try:
        given = {
            "programs": programs,
            "bait": bait.open(user),
            "limits": LIMITS,
            "missing": taken,
            "allow": allow,
        }
        done = subprocess.run(
            [runtime.python, "-I", runtime.driver],
            input=json.dumps(given).encode(),
            capture_output=True,
            env={
                "HOME": str(bait.home),
                "TMPDIR": str(bait.temporary),
                "API_KEY": bait.secret,
                "LD_LIBRARY_PATH": str(runtime.libraries),
            },
            cwd=bait.home,
            start_new_session=True,
            check=False,
            timeout=240,
            **({"user": user, "group": user, "extra_groups": []} if user and IS_ROOT else {}),
        )
        assert done.returncode == 0, done.stderr.decode()[:3000] + done.stderr.decode()[-3000:]
        yield SimpleNamespace(name=name, bait=bait, **json.loads(done.stdout))
    finally:
        bait.close()


def test_the_report_says_what_holds(world) -> None:
    _, _, allowed, means = WORLDS[world.name]
    active, _, missing = world.report.partition("NOT PROTECTED: ")
    for wall in WALLS:
        assert (f" {wall}" in active.partition(";")[0]) == (wall not in allowed), world.report
        assert (f"{wall} (" in missing) == (wall in allowed), world.report
    assert means in active or not IS_ROOT, "without root, the worlds of root are played by the user"


def test_a_containers_root_may_be_allowed_user_namespaces(runtime, open_folder) -> None:
    world = (True, ["CAP_SYS_ADMIN"], [], "user namespace")
    with played(
        "container_with_user_namespaces", world, {"flood": PROGRAMS["many_large_files"]}, runtime, open_folder
    ) as found:
        assert "user namespace" in found.report
        assert "NOT PROTECTED" not in found.report
        assert found.results["flood"]["ended_by"] == "exited"
        assert found.results["good"]["stdout"] == "42\n"
        assert (found.left, found.temporary) == ([], [])


@pytest.mark.parametrize("name", PROGRAMS)
def test_contained(world, name: str) -> None:
    result = world.results[name]
    assert "ESCAPED" not in result["stdout"], result
    assert len(result["stdout"]) + len(result["stderr"]) <= 2 * 3 * 64 * 1024
    assert result["wall_s"] < LIMITS["wall_s"] + 5
    assert result.get("after", "42\n") == "42\n", "the program after it did not run"


ENDINGS = {
    "infinite_loop": {"wall", "cpu"},
    "sleep_forever": {"wall"},
    "ignores_every_signal": {"wall", "cpu"},
    "stops_itself": {"wall"},
    "fork_bomb": {"wall", "cpu"},
    "thread_bomb": {"wall", "cpu"},
    "memory_of_many_processes": {"memory", "wall"},
    "flood_of_output": {"output"},
    "flood_of_errors": {"output"},
    "flood_by_children": {"output"},
    "daemon": {"exited"},
    "zombies": {"exited"},
    "crashes": {"exited"},
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_result_says_how_it_ended(world, name: str) -> None:
    assert world.results[name]["ended_by"] in ENDINGS[name], world.results[name]


def test_a_program_cannot_forge_its_end(world) -> None:
    assert world.results["forges_the_report"]["exit_code"] == 9
    assert world.results["closes_its_output"]["exit_code"] == 7
    assert world.results["crashes"]["signal"] == 11
    assert world.results["ends_by_a_signal"]["signal"] == 9
    assert "still here" in world.results["kill_the_parent"]["stdout"]


def test_what_is_kept_between_programs_is_bounded(world) -> None:
    assert (
        max(result["workspace_bytes"] for result in world.results.values())
        < LIMITS["disk_mib"] * 2**20 + 2**20
    )


def test_good_programs_run_afterwards(world) -> None:
    good = world.results["good"]
    assert (good["stdout"], good["exit_code"], good["ended_by"]) == ("42\n", 0, "exited")


def test_no_process_is_left(world) -> None:
    assert world.left == []
    assert world.bait.canary.poll() is None, "a process of the host was killed"


def test_the_hosts_files_are_as_before(world) -> None:
    bait = world.bait
    assert bait.file.read_text() == "untouched"
    assert bait.look() == bait.facts
    assert os.listdir(bait.folder) == ["file"]
    assert os.listdir(bait.home) == []
    assert world.temporary == []
    for folder in (
        "/",
        "/etc",
        "/tmp",
        "/var/tmp",
        "/dev/shm",
        "/run",
        "/usr/lib",
        str(ROOT),
        str(ROOT / "agentrl"),
        sys.base_prefix,
    ):
        assert not os.path.exists(os.path.join(folder, bait.nonce)), folder


def test_no_server_of_the_host_was_reached(world) -> None:
    assert world.bait.reached == []
