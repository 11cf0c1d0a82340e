"""Landlock: kernel rules for the paths that a process may access, without namespaces.

It is the second wall if there are namespaces, and the first one otherwise.
"""

from __future__ import annotations

import ctypes
import os

from .kernel import syscall

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_QUERY = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15}  # number of file rights; 16 since version 5
_TCP_SINCE, _TCP = 4, 3
_SCOPE_SINCE, _SCOPE_SOCKETS_AND_SIGNALS = 6, 3

READ = _EXECUTE | _READ_FILE | _READ_DIR
READ_FILE = _EXECUTE | _READ_FILE
USE_DEVICE = _READ_FILE | _WRITE_FILE


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def version() -> int:
    """Return the version of the kernel's Landlock interface, 0 if it is off."""
    try:
        return syscall(_CREATE_RULESET, None, 0, _VERSION_QUERY)
    except OSError:
        return 0


def restrict(readable: list[str], writable: list[str], devices: list[str]) -> None:
    """Restrict this process and its children: read below `readable`, full access below `writable`, use
    `devices`.

    Also forbids TCP, and signals and abstract sockets to outside processes, if the kernel supports it. Needs
    no_new_privs.

    Raises:
        OSError: the kernel has no Landlock.
    """
    abi = version()
    every = (1 << _RIGHTS_OF_ABI.get(abi, 16)) - 1
    wanted = _Ruleset(
        every, _TCP if abi >= _TCP_SINCE else 0, _SCOPE_SOCKETS_AND_SIGNALS if abi >= _SCOPE_SINCE else 0
    )
    known_bytes = 8 if abi < _TCP_SINCE else 16 if abi < _SCOPE_SINCE else 24
    ruleset = syscall(_CREATE_RULESET, wanted, known_bytes, 0)
    try:
        for paths, rights in ((readable, READ), (writable, every), (devices, USE_DEVICE)):
            for path in paths:
                _allow(ruleset, path, rights & every)
        syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # a missing path needs no rule
    try:
        if not os.path.isdir(path):
            rights &= READ_FILE | USE_DEVICE
        syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, _PathRule(rights, parent), 0)
    finally:
        os.close(parent)
