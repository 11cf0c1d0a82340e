"""The seccomp filter: refuses system calls that no computation needs.

It is a denylist. Interpreters and numeric libraries use some two hundred calls, which differ by version; a
missing one in an allowlist would fail correct programs. Calls newer than the list are refused as unknown
(ENOSYS), so libraries fall back to older ones.
"""

from __future__ import annotations

import ctypes
import errno

from .kernel import PR_SET_SECCOMP, prctl

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000
LAST_KNOWN = 462
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
NAMESPACE_FLAGS = 0x7E020000  # all CLONE_NEW* flags of clone

REFUSED: dict[str, tuple[int | None, int | None]] = {  # name: (number on x86_64, number on aarch64)
    # other processes
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    # the network; socketpair is allowed, because event loops need it
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    # memory that the limits of a process do not count
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # large parts of the kernel with a history of vulnerabilities
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "fanotify_init": (300, 262),
    "modify_ldt": (154, None),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # the machine
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "personality": (135, 92),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "nfsservctl": (180, 42),
}
ONLY_ITSELF: dict[
    str, tuple[int, int]
] = {  # the first argument is a process id: only 0, the caller, is allowed
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
PRETENDED: dict[
    str, tuple[int | None, int | None]
] = {  # without namespaces; Landlock does not cover metadata
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}
CLONE3 = 435
CLONE = {"x86_64": 56, "aarch64": 220}
IOCTL = {"x86_64": 16, "aarch64": 29}

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
# Offsets in struct seccomp_data; low halves, on a little-endian machine.
_NUMBER, _ARCH, _ARG0, _ARG1 = 0, 4, 16, 24

Instruction = tuple[int, int, int, int]


def filter_program(arch: str, *, keeps_metadata: bool) -> list[Instruction]:
    """Return the BPF program as (code, jump if true, jump if false, constant).

    keeps_metadata: calls that change permissions, owners and times of files do nothing but report success.
    """
    done = _ERRNO
    refuse, unknown = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, AUDIT_ARCH[arch]),
        (_RETURN, 0, 0, _KILL),  # another architecture (32-bit calls) has other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, X32_BIT),
        (_RETURN, 0, 0, _KILL),
        (_AT_LEAST, 0, 1, LAST_KNOWN + 1),
        (_RETURN, 0, 0, unknown),
        # The flags of clone3 are in memory, which a filter cannot read: libraries fall back to clone.
        (_EQUAL, 0, 1, CLONE3),
        (_RETURN, 0, 0, unknown),
    ]
    column = 0 if arch == "x86_64" else 1
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    for numbers in PRETENDED.values() if keeps_metadata else ():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, done)]
    for pair in ONLY_ITSELF.values():
        program += [
            (_EQUAL, 0, 4, pair[column]),
            (_LOAD, 0, 0, _ARG0),
            (_EQUAL, 1, 0, 0),
            (_RETURN, 0, 0, refuse),
            (_RETURN, 0, 0, _ALLOW),
        ]
    program += [
        (_EQUAL, 0, 4, CLONE[arch]),
        (_LOAD, 0, 0, _ARG0),
        (_ANY_BIT, 0, 1, NAMESPACE_FLAGS),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
        (_EQUAL, 0, 4, IOCTL[arch]),
        (_LOAD, 0, 0, _ARG1),
        (_EQUAL, 1, 0, TIOCSTI),
        (_EQUAL, 0, 1, TIOCLINUX),
        (_RETURN, 0, 0, refuse),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return program


class _Filter(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("jt", ctypes.c_uint8),
        ("jf", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("filter", ctypes.POINTER(_Filter)))


def install_filter(program: list[Instruction]) -> None:
    """Filter the system calls of this process and its children, irrevocably. Needs no_new_privs.

    Raises OSError.
    """
    instructions = (_Filter * len(program))(*(_Filter(*instruction) for instruction in program))
    header = _Program(len(program), instructions)
    prctl(PR_SET_SECCOMP, 2, ctypes.addressof(header))
