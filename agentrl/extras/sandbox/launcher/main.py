"""The launcher of one execution: read the request, build the walls, start, watch, kill, reply.

The reply is a mapping. It has `error`, a wall that could not be built, or: stdout, stderr, status (as from
`os.wait`), why, is_truncated, cpu_s, wall_s, peak_bytes, layers (mechanisms in use), is_workspace_cut.
"""

from __future__ import annotations

import _signal as signal  # `signal` itself loads enum: milliseconds at every start
import fcntl
import os
import resource

from . import identity, jail, kernel, landlock, processes
from .cgroup import ControlGroup
from .request import ExecutionRequest, read_request, write_reply
from .tree import Budget, empty, pack, read_all, unpack, write_all, write_files
from .watch import STARTED, ProcessWatch

NAMESPACES = (
    kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
NO_STATUS = -1


def main() -> None:
    host = 0
    request = read_request(host)
    reply_to = os.dup(1)
    os.set_inheritable(reply_to, False)
    execution = Execution(request, host)
    try:
        reply = execution.run()
    except OSError as error:
        reply = {"error": f"{execution.step}: {error}"}
    finally:
        execution.clean()
    write_reply(reply_to, reply)


class Execution:
    """One program, from setup to cleanup. `step` names the current action, for errors."""

    def __init__(self, request: ExecutionRequest, host: int) -> None:
        self.step = "the request"
        self._request = request
        self._host = host
        self._layers: list[str] = []
        self._folder = ""  # where the program writes on the host's disk, if there is no tmpfs
        self._scratch = -1
        self._user: int | None = None
        self._has_namespaces = False
        self._groups = ControlGroup({})
        self._is_workspace_cut = False
        self._workspace = os.open(request.workspace, os.O_RDWR | os.O_CLOEXEC) if request.workspace else -1

    def run(self) -> dict[str, object]:
        request = self._request
        if "cgroup" not in request.avoid:
            self.step = "control groups"
            self._groups = ControlGroup.make(
                memory_bytes=request.memory_bytes, max_processes=request.max_processes + 1
            )
        if "namespaces" in request.avoid or not self._enter_namespaces():
            self._stay_outside()
        self.step = "files of the program"
        self._prepare_scratch()
        self.step = "starting the program"
        watch, pid = self._start()
        self.step = "watching the program"
        watch.until_end(
            lambda: processes.descendants(pid) if self._has_namespaces else processes.descendants(os.getpid())
        )
        self._kill(pid)
        watch.drain()
        self.step = "keeping the program's files"
        self._keep_files()
        return self._reply(watch)

    def clean(self) -> None:
        self._groups.remove()
        if self._folder:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            empty(folder)
            os.close(folder)
            os.rmdir(self._folder)

    # ------------------------------------------------------------------------------------------ who and where

    def _enter_namespaces(self) -> bool:
        """Enter new namespaces: as root directly, else through a user namespace.

        False if neither is allowed.
        """
        self.step = "namespaces"
        if os.geteuid() == 0 and (user := identity.stranger()) is not None:
            try:
                kernel.unshare(kernel.CLONE_NEWNS | NAMESPACES)
                self._user = user
            except OSError:
                # A container's root without CAP_SYS_ADMIN: an unprivileged user may be allowed more.
                if not _may_unshare(user):
                    return self._go_without("not permitted")
                self._groups.remove()  # they are root's
                self._groups = ControlGroup({})
                identity.become(user)
        if self._user is None:
            user, group = os.geteuid(), os.getegid()
            try:
                kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | NAMESPACES)
                identity.map_self(user, group)
            except OSError as error:
                return self._go_without(error.strerror or "failed")
        self._layers.append("user namespace" if self._user is None else "namespaces, as root")
        kernel.make_mounts_private()
        self._has_namespaces = True
        return True

    def _go_without(self, why: str) -> bool:
        self._layers.append(f"no namespaces: {why}")
        return False

    def _stay_outside(self) -> None:
        if os.geteuid() == 0 and (user := identity.stranger()) is not None:
            self._user = (
                user  # used by this program only; the launcher stays root, to kill the user's processes
            )
            self._layers.append("a user id of its own")
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)

    def _prepare_scratch(self) -> None:
        request = self._request
        if self._has_namespaces:
            limits = {
                "size": str(request.disk_bytes),
                "nr_inodes": str(request.max_files + 8),
                "mode": "0711",
            }
            self._scratch = kernel.new_tmpfs(kernel.MOUNT_ATTR_NOSUID | kernel.MOUNT_ATTR_NODEV, **limits)
            root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._scratch)
        else:
            self._folder = os.path.join(request.temporary, f"agentrl-sandbox-{os.urandom(8).hex()}")
            os.mkdir(self._folder, 0o711)
            root = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.mkdir("code", 0o755, dir_fd=root)
            code = os.open("code", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
            write_files(code, jail.code_files(request), mode=0o444)
            os.close(code)
        owner = identity.INNER_ID if self._has_namespaces and self._user is None else self._user
        for name in ("work", "tmp", "shm"):
            os.mkdir(name, 0o700, dir_fd=root)
            if owner is not None:
                os.chown(name, owner, owner, dir_fd=root)
        self._work = os.open("work", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
        os.close(root)
        if self._workspace >= 0:
            unpack(read_all(self._workspace, os.fstat(self._workspace).st_size), self._work, owner=owner)
        write_files(self._work, request.files, owner=owner)

    # -------------------------------------------------------------------------------------- start, end, files

    def _start(self) -> tuple[ProcessWatch, int]:
        """Start the program; return its watch, and the process that is the ancestor of all its processes."""
        out, err, status, go = os.pipe(), os.pipe(), os.pipe(), os.pipe()
        stdin = self._stdin()
        pid = os.fork()
        if pid == 0:
            for descriptor in (out[0], err[0], status[0], go[1]):
                os.close(descriptor)
            Inside(self._request, self._has_namespaces, self._user, self._folder).run(
                (stdin, out[1], out[1] if self._request.is_merged else err[1]),
                scratch=self._scratch,
                status=status[1],
                go=go[0],
            )
        # Close the child's ends here, or the other program would never see the end of the channel.
        for descriptor in (out[1], err[1], status[1], go[0], stdin, *self._request.channel):
            os.close(descriptor)
        self._groups.add(pid)
        try:
            # The child waits for this until it is in its control group; it exits if the launcher dies.
            os.write(go[1], b"g")
        except BrokenPipeError:
            self.step = "starting the program, which ended at once"
        watch = ProcessWatch(
            self._request,
            outputs=(out[0], err[0]),
            status=status[0],
            host=self._host,
            num_oom_kills=self._groups.num_oom_kills,
        )
        return watch, pid

    def _stdin(self) -> int:
        """Return a read-only, sealed file with the program's input.

        A pipe would need a process to feed it.
        """
        descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        write_all(descriptor, self._request.stdin)
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
        )
        return descriptor

    def _kill(self, pid: int) -> None:
        if self._has_namespaces:
            # Process 1 of the PID namespace: the kernel kills all others with it.
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        if self._user is not None:
            self._kill_stranger(self._user)
        processes.kill_all(os.getpid())

    def _kill_stranger(self, user: int) -> None:
        """Kill all processes of the program's user at once. Only kill(-1) as that user is free of races."""
        killer = os.fork()
        if killer == 0:
            identity.become(user)
            os.kill(-1, signal.SIGKILL)
            os._exit(0)
        os.waitpid(killer, 0)

    def _keep_files(self) -> None:
        if self._workspace < 0:
            return
        budget = Budget(self._request.disk_bytes, self._request.max_files)
        data = pack(self._work, budget)
        os.lseek(self._workspace, 0, os.SEEK_SET)
        os.truncate(self._workspace, 0)
        write_all(self._workspace, data)
        self._is_workspace_cut = budget.is_exceeded

    def _reply(self, watch: ProcessWatch) -> dict[str, object]:
        status, cpu_s, error = NO_STATUS, watch.cpu_s, ""
        has_started = watch.report.startswith(STARTED)
        # If the start failed, a second line follows: ignore it.
        report = watch.report.removeprefix(STARTED).partition(b"\n")[0]
        if report[:1] == b"!":
            return {"error": report[1:].decode("utf-8", "replace")}
        if report:
            first, second = report.split()
            status, cpu_s = int(first), max(cpu_s, float(second))
        elif has_started:  # without namespaces, a program can kill the process that waits for it
            status = signal.SIGKILL
        elif not watch.why and not self._groups.num_oom_kills():
            error = "the program's first process ended without a report"
        if self._groups.num_oom_kills() and watch.why == "":
            watch.why = "memory"
        return {
            "error": error,
            "stdout": watch.stdout,
            "stderr": watch.stderr,
            "status": status,
            "why": watch.why,
            "is_truncated": watch.is_truncated,
            "cpu_s": cpu_s,
            "wall_s": watch.wall_s,
            "peak_bytes": watch.peak_bytes,
            "layers": [
                *self._layers,
                *self._landlock(),
                *(f"cgroup {name}" for name in self._groups.controllers),
            ],
            "is_workspace_cut": self._is_workspace_cut,
        }

    def _landlock(self) -> list[str]:
        number = 0 if "landlock" in self._request.avoid else landlock.version()
        return [f"landlock {number}"] if number else []


def _may_unshare(user: int) -> bool:
    """Return whether this user may create a user namespace, by trying it in a child process."""
    child = os.fork()
    if child == 0:
        try:
            identity.become(user)
            kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | NAMESPACES)
            identity.map_self(user, user)
            kernel.make_mounts_private()
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


class Inside:
    """The first process inside: completes the walls, starts the program, waits for it, and reports its exit.

    With namespaces it is process 1: when it exits, the kernel kills all others.
    """

    def __init__(
        self, request: ExecutionRequest, has_namespaces: bool, user: int | None, folder: str
    ) -> None:
        self._request = request
        self._has_namespaces = has_namespaces
        self._user = user
        self._layout = jail.Layout(request, is_moved=has_namespaces, scratch=folder)
        self._step = "walls"

    def run(self, streams: tuple[int, int, int], *, scratch: int, status: int, go: int) -> None:
        """Do all of this, and exit."""
        try:
            self._build(scratch)
            self._step = "waiting for the launcher"
            if os.read(go, 1):  # b"": the launcher died, or could not add this process to its control group
                self._step = "starting the interpreter"
                self._run_program(streams, status)
        except OSError as error:
            os.write(status, f"!{self._step}: {error}\n".encode())
        finally:
            os._exit(0)

    def _build(self, scratch: int) -> None:
        if self._has_namespaces:
            jail.build_root(
                self._request,
                self._layout,
                scratch,
                self._user if self._user is not None else identity.INNER_ID,
            )
            kernel.set_hostname(b"sandbox")
        self._step = "privileges"
        os.setsid()
        if self._user is not None:
            kernel.drop_bounding_set()
            identity.become(self._user)
        identity.renounce()
        # The program has the same user: it must not trace or read this process.
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)

    def _run_program(self, streams: tuple[int, int, int], status: int) -> None:
        os.write(status, STARTED)
        program = os.fork()
        if program == 0:
            self._become_program(streams, status)
        for descriptor in {*streams, *self._request.channel}:
            os.close(descriptor)
        while True:
            pid, ended = os.wait()
            if pid == program:
                break
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        os.write(status, f"{ended} {used.ru_utime + used.ru_stime:.3f}\n".encode())

    def _become_program(self, streams: tuple[int, int, int], status: int) -> None:
        try:
            self._step = "limits"
            # RLIMIT_NPROC counts all threads of the user on the machine, not only the program's.
            extra = (
                1 if self._has_namespaces or self._user is not None else processes.count_of_user(os.geteuid())
            )
            jail.set_limits(self._request, max_processes=self._request.max_processes + extra)
            os.setsid()
            self._step = "landlock and seccomp"
            jail.confine(self._layout, self._request)
            self._step = "starting the interpreter"
            jail.execute(self._layout, self._request, streams, keep=status)
        except OSError as error:
            os.write(status, f"!{self._step}: {error}\n".encode())
        finally:
            os._exit(127)
