"""System calls that `os` does not wrap. All raise OSError. See the manual page of the same name."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_REC, MS_PRIVATE = 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _O_CLOEXEC = 1, 0o2000000
_MOVE_MOUNT_F_EMPTY_PATH = 4
_FSCONFIG_SET_STRING, _FSCONFIG_CREATE = 1, 6
_LINUX_CAPABILITY_VERSION_3 = 0x20080522

# Numbers from 424 on are the same on all architectures.
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 442

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(number: int, *args: int | bytes | ctypes.Array | ctypes.Structure | None) -> int:
    """Make a system call. Integers are passed as C longs, bytes and ctypes objects as pointers."""
    converted = [
        ctypes.c_long(a)
        if isinstance(a, int)
        else ctypes.byref(a)
        if isinstance(a, (ctypes.Structure, ctypes.Array))
        else a
        for a in args
    ]
    return _checked(_libc.syscall(ctypes.c_long(number), *converted))


def machine() -> str:
    return os.uname().machine


def unshare(flags: int) -> None:
    _checked(_libc.unshare(ctypes.c_int(flags)))


def prctl(option: int, value: int = 0, third: int = 0) -> int:
    return _checked(
        _libc.prctl(
            option, ctypes.c_ulong(value), ctypes.c_ulong(third), ctypes.c_ulong(0), ctypes.c_ulong(0)
        )
    )


def make_mounts_private() -> None:
    _checked(_libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))


def set_hostname(name: bytes) -> None:
    _checked(_libc.sethostname(name, ctypes.c_size_t(len(name))))
    _checked(_libc.setdomainname(name, ctypes.c_size_t(len(name))))


def umount(target: str) -> None:
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH))


def pivot_root(folder: str, put_old: str) -> None:
    syscall(_PIVOT_ROOT[machine()], os.fsencode(folder), os.fsencode(put_old))


def clone_mount(path: str, *, recursive: bool = True) -> int:
    """Return a descriptor of a detached copy of the mount at `path`."""
    flags = _OPEN_TREE_CLONE | _O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    return syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags)


def new_tmpfs(attributes: int, **options: str) -> int:
    """Return a descriptor of a new, detached tmpfs. options: `size`, `nr_inodes`, `mode`."""
    context = syscall(_FSOPEN, b"tmpfs", 1)
    try:
        for name, value in options.items():
            syscall(_FSCONFIG, context, _FSCONFIG_SET_STRING, name.encode(), value.encode(), 0)
        syscall(_FSCONFIG, context, _FSCONFIG_CREATE, None, None, 0)
        return syscall(_FSMOUNT, context, 1, attributes)
    finally:
        os.close(context)


def attach_mount(mount: int, target: str) -> None:
    syscall(_MOVE_MOUNT, mount, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def restrict_mount(mount: int | str, attributes: int) -> None:
    """Add attributes to a mount. A descriptor includes the mounts below it, a path does not."""
    attr = _MountAttr(attributes, 0, 0, 0)
    if isinstance(mount, int):
        syscall(_MOUNT_SETATTR, mount, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, attr, ctypes.sizeof(attr))
    else:
        syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(mount), 0, attr, ctypes.sizeof(attr))


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def drop_bounding_set() -> None:
    """Prevent this process from gaining capabilities by an exec.

    Without CAP_SETPCAP there are none to gain.
    """
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            return  # beyond the last capability of this kernel, or not permitted


def drop_capabilities() -> None:
    """Drop all capabilities of this process."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    syscall(_CAPSET[machine()], _CapabilityHeader(_LINUX_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
