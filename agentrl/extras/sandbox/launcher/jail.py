"""The walls around a program: a root of its own with namespaces, and the limits that any process can set
itself.

`build_root` runs in the first process inside; `set_limits`, `confine` and `execute` run in the program's
process.
"""

from __future__ import annotations

import _signal as signal  # `signal` itself loads enum: milliseconds at every start
import fcntl
import os
import resource
import stat

from . import kernel, landlock, seccomp
from .request import ExecutionRequest
from .tree import write_files

STAGING = "/tmp"
"""Where the new root is assembled, in a mount namespace of its own. It must exist on every machine."""
SYSTEM_LIBRARIES = ("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/usr/local/lib")
SYSTEM_COMMANDS = ("/bin", "/usr/bin", "/usr/local/bin")
"""Folders of commands; `setuid` files in them give no privileges."""
COMMAND_DATA = ("/etc/alternatives", "/usr/share")
"""What commands read beside libraries: which `awk` is meant, templates of git, modules of perl."""
DEVICES = ("null", "zero", "full", "random", "urandom")
NUM_DESCRIPTORS = 5
"""Descriptors of a program with a channel: 0 to 2, and the two ends."""
CODE = "/sandbox"
WORK = "/work"
PYTHON = "/python"
SYSTEM_PREFIXES = ("/usr", "/usr/local")

RUNNER = os.path.join(os.path.dirname(__file__), "runner.py")


class Layout:
    """Paths as the program sees them. is_moved: the program has a root of its own."""

    def __init__(self, request: ExecutionRequest, *, is_moved: bool, scratch: str = "") -> None:
        self.is_moved = is_moved
        keeps_prefix = request.prefix in SYSTEM_PREFIXES or not is_moved
        self.prefix = request.prefix if keeps_prefix else PYTHON
        self.python = self.prefix + request.python.removeprefix(request.prefix)
        self.packages = [
            f"/packages/{index}" if is_moved else path for index, path in enumerate(request.packages)
        ]
        self.system = [*SYSTEM_LIBRARIES, *(SYSTEM_COMMANDS if request.commands else ())]
        self.data = [*(COMMAND_DATA if request.commands else ("/usr/share/zoneinfo",)), "/etc/ld.so.cache"]
        self.has_commands = request.commands
        self.code = CODE if is_moved else f"{scratch}/code"
        self.work = WORK if is_moved else f"{scratch}/work"
        self.temporary = "/tmp" if is_moved else f"{scratch}/tmp"
        self.shared_memory = "/dev/shm" if is_moved else self.temporary

    def command(self, request: ExecutionRequest) -> list[str]:
        flags = ["echo"] if request.echo else []
        return [
            self.python,
            "-I",
            "-S",
            "-B",
            "-X",
            "utf8",
            f"{self.code}/runner.py",
            ":".join(self.packages),
            *flags,
        ]

    def environment(self) -> dict[str, str]:
        one_thread = dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
        )
        places = {
            "HOME": self.work,
            "TMPDIR": self.temporary,
            "PATH": f"{self.prefix}/bin",
            "LD_LIBRARY_PATH": f"{self.prefix}/lib",
        }
        if self.has_commands:  # an interpreter that a command starts finds the same packages
            places["PATH"] = ":".join(dict.fromkeys([places["PATH"], *reversed(SYSTEM_COMMANDS)]))
            places["PYTHONPATH"] = ":".join(self.packages)
            places["PYTHONDONTWRITEBYTECODE"] = "1"
        return {**places, "LANG": "C.UTF-8", "TZ": "UTC", "MPLBACKEND": "Agg", **one_thread}

    def readable(self) -> list[str]:
        if self.is_moved:
            return ["/"]  # a root of its own, which has no secrets
        return [
            self.prefix,
            *self.packages,
            *self.system,
            self.code,
            *self.data,
        ]

    def writable(self) -> list[str]:
        return [self.work, self.temporary, self.shared_memory]


def code_files(request: ExecutionRequest) -> dict[str, bytes]:
    with open(RUNNER, "rb") as file:
        return {"runner.py": file.read(), "main.py": request.source.encode("utf-8", "surrogatepass")}


def build_root(request: ExecutionRequest, layout: Layout, scratch: int, owner: int) -> None:
    """Replace this process's root by a read-only one: libraries, the interpreter, some devices, and
    `scratch`.

    scratch: descriptor of a detached tmpfs with the folders work, tmp and shm, the only writable ones.

    Raises:
        OSError: the kernel refuses one of the mounts.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    files = code_files(request)  # read before the staging folder hides what may be below it
    sources = _sources(request, layout)
    root = kernel.new_tmpfs(
        kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV, size="4m", nr_inodes="1k", mode="0755"
    )
    kernel.attach_mount(root, STAGING)
    for mount, inner in sources:
        _attach(mount, STAGING + inner)
    for link in layout.system:
        if os.path.islink(link) and not os.path.lexists(STAGING + link):
            os.symlink(os.readlink(link), STAGING + link)
    os.mkdir(STAGING + "/.scratch")
    kernel.attach_mount(scratch, STAGING + "/.scratch")
    for name, inner in (("work", layout.work), ("tmp", layout.temporary), ("shm", layout.shared_memory)):
        mount = kernel.clone_mount(f"{STAGING}/.scratch/{name}")
        _attach(mount, STAGING + inner)
    kernel.umount(STAGING + "/.scratch")
    os.rmdir(STAGING + "/.scratch")
    os.makedirs(STAGING + layout.code)
    folder = os.open(STAGING + layout.code, os.O_RDONLY | os.O_DIRECTORY)
    write_files(folder, files, mode=0o444)
    os.close(folder)
    _write_accounts(owner)
    os.chdir(STAGING)
    kernel.pivot_root(".", ".")
    kernel.umount(".")
    os.chdir("/")
    kernel.restrict_mount("/", kernel.MOUNT_ATTR_RDONLY)


def set_limits(request: ExecutionRequest, *, max_processes: int) -> None:
    """Set the resource limits of this process for good: soft and hard limits are equal, except for CPU
    time.
    """
    cpu_s = max(1, int(request.cpu_s + 0.999))
    for kind, soft, hard in (
        (resource.RLIMIT_AS, request.memory_bytes, request.memory_bytes),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),  # soft limit first: SIGXCPU tells why it was killed
        (resource.RLIMIT_FSIZE, request.file_bytes, request.file_bytes),
        (resource.RLIMIT_NOFILE, request.max_open_files, request.max_open_files),
        (resource.RLIMIT_NPROC, max_processes, max_processes),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_SIGPENDING, 256, 256),
    ):
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def confine(layout: Layout, request: ExecutionRequest) -> None:
    """Apply the last two walls to this process, Landlock and the system call filter, if the kernel supports
    them.
    """
    devices = [f"/dev/{name}" for name in DEVICES]
    if "landlock" not in request.avoid and landlock.version():
        landlock.restrict(layout.readable(), layout.writable(), devices)
    arch = kernel.machine()
    if "seccomp" not in request.avoid and arch in seccomp.AUDIT_ARCH:
        try:
            seccomp.install_filter(seccomp.filter_program(arch, keeps_metadata=not layout.is_moved))
        except OSError:
            return  # the self-test will report the missing wall


def execute(
    layout: Layout, request: ExecutionRequest, descriptors: tuple[int, int, int], *, keep: int
) -> None:
    """Execute the program, with the given standard streams, its channel and no other descriptors.

    Does not return.

    keep: a close-on-exec descriptor, to report a failure of the exec.
    """
    # Duplicated, because they may be 4 and 3.
    channel = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, NUM_DESCRIPTORS) for descriptor in request.channel]
    given = [*descriptors, *channel]
    for target, descriptor in enumerate(given):
        os.dup2(descriptor, target)
    os.closerange(len(given), keep)
    os.closerange(keep + 1, 4096)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    # Ignored, so that a file beyond the limit raises OSError instead of a silent death.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.chdir(layout.work)
    os.umask(0o077)
    os.execve(layout.python, layout.command(request), layout.environment())


def _sources(request: ExecutionRequest, layout: Layout) -> list[tuple[int, str]]:
    """Return detached, read-only mounts of what the program may read, with their paths in its view."""
    attributes = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID
    files = [
        *(path for path in layout.system if os.path.isdir(path) and not os.path.islink(path)),
        *layout.data,
    ]
    if request.prefix in SYSTEM_PREFIXES:
        is_there = any(request.python.startswith(f"{path}/") for path in files)
        pairs = [(path, path) for path in (*files, *([] if is_there else [request.python]))]
    else:
        pairs = [*((path, path) for path in files), (request.prefix, layout.prefix)]
    pairs += zip(request.packages, layout.packages, strict=True)
    found = []
    for path, inner in pairs:
        if os.path.exists(path):
            mount = kernel.clone_mount(path)
            kernel.restrict_mount(mount, attributes | kernel.MOUNT_ATTR_NODEV)
            found.append((mount, inner))
    for name in DEVICES:
        mount = kernel.clone_mount(f"/dev/{name}")
        kernel.restrict_mount(mount, kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NOEXEC)
        found.append((mount, f"/dev/{name}"))
    return found


def _attach(mount: int, target: str) -> None:
    """Attach a detached mount at `target`, after creating a mount point of the same kind."""
    if stat.S_ISDIR(os.fstat(mount).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))
    kernel.attach_mount(mount, target)
    os.close(mount)


def _write_accounts(owner: int) -> None:
    os.makedirs(STAGING + "/etc", exist_ok=True)
    with open(STAGING + "/etc/passwd", "w", encoding="ascii") as file:
        file.write(f"sandbox:x:{owner}:{owner}::{WORK}:/bin/false\n")
    with open(STAGING + "/etc/group", "w", encoding="ascii") as file:
        file.write(f"sandbox:x:{owner}:\n")
