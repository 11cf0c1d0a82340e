"""Runs a command whose system calls the kernel refuses: `[*refusing("flock"), *command]`.

A seccomp filter, as containers have them: what a machine without a feature answers, on one that has it.
"""

import errno
import os
import sys

CALLS = {  # name: (number on x86_64, number on aarch64, the error)
    "flock": (73, 32, errno.ENOLCK),
    "unshare": (272, 97, errno.EPERM),
}
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000


def refusing(name):
    """Return the words before a command that may not make the call `name`."""
    return [sys.executable, __file__, name]


def main():
    from agentrl.extras.sandbox.launcher.kernel import PR_SET_NO_NEW_PRIVS, machine, prctl
    from agentrl.extras.sandbox.launcher.seccomp import install_filter

    name, *command = sys.argv[1:]
    *numbers, error = CALLS[name]
    number = numbers[("x86_64", "aarch64").index(machine())]
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    install_filter(
        [(LOAD, 0, 0, 0), (EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | error), (RETURN, 0, 0, ALLOW)]
    )
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
