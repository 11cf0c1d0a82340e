"""The active walls: what the probe could do on this machine, not what the machine promises."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, SandboxError
from agentrl.extras.sandbox.limits import MIB, WALLS, Limits, Wall
from agentrl.extras.sandbox.result import SandboxResult

PROBE = (Path(__file__).parent / "probe.py").read_text(encoding="utf-8")
COMM_CHARS = 15
"""The kernel truncates process names to this length."""


@dataclass(frozen=True, slots=True)
class Protections:
    """The walls that held in the self-test, those that did not, with the reasons, and the mechanisms in
    use.
    """

    active: tuple[Wall, ...]
    missing: Mapping[Wall, str]
    layers: tuple[str, ...]

    def __str__(self) -> str:
        text = (
            f"sandbox: active {', '.join(self.active) or 'nothing'}; by {', '.join(self.layers) or 'nothing'}"
        )
        gaps = "; ".join(f"{wall} ({why})" for wall, why in self.missing.items())
        return f"{text}; NOT PROTECTED: {gaps}" if gaps else text


@contextmanager
def bait(limits: Limits) -> Iterator[dict[str, Any]]:
    """Set up what a program must not reach: a world-writable file and folder, two servers, and this
    process.
    """
    name = secrets.token_hex(COMM_CHARS)[:COMM_CHARS]
    folder = Path(tempfile.mkdtemp(prefix="agentrl-bait-"))
    try:
        folder.chmod(0o777)
        file = folder / "file"
        file.write_text("bait", encoding="ascii")
        file.chmod(0o666)
        with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract:
            tcp.bind(("127.0.0.1", 0))
            tcp.listen()
            abstract.bind("\0" + name)
            abstract.listen()
            yield {
                "folder": str(folder),
                "file": str(file),
                "port": tcp.getsockname()[1],
                "name": name,
                "pid": os.getpid(),
                "memory_bytes": limits.memory_mib * MIB,
                "file_bytes": limits.file_mib * MIB,
                "max_processes": limits.max_processes,
            }
    finally:
        shutil.rmtree(folder)


def judge(
    result: SandboxResult, reply: Mapping[str, Any], baited: Mapping[str, Any], limits: Limits
) -> Protections:
    """Return which walls held against the probe.

    Raises:
        SandboxError: the probe did not run to its end.
    """
    if not result.is_ok:
        tail = result.stderr.strip().rpartition("\n")[2]
        raise SandboxError(f"the sandbox's self-test failed: {result.describe()}: {tail[:300]}")
    facts = json.loads(result.stdout)
    gaps = {wall: "; ".join(whys) for wall, whys in _gaps(facts, reply, baited, limits).items() if whys}
    layers = [*reply["layers"], *(["seccomp"] if facts["has_filter"] else [])]
    return Protections(tuple(wall for wall in WALLS if wall not in gaps), gaps, tuple(layers))


def refuse(protections: Protections, allowed: Sequence[Wall]) -> None:
    """Raise ConfigError if a wall is missing that is not in `allowed`."""
    refused = {wall: why for wall, why in protections.missing.items() if wall not in allowed}
    if refused:
        gaps = "; ".join(f"{wall} ({why})" for wall, why in refused.items())
        raise ConfigError(
            f"this machine is not protected from the model's programs: {gaps}. Allow user "
            "namespaces or give the container CAP_SYS_ADMIN (agentrl/extras/sandbox/README.md), or accept "
            f"the risk with allow_unprotected: [{', '.join(protections.missing)}] in "
            "agent.tool_config.python and in reward.reward_config.code"
        )


def _gaps(
    facts: Mapping[str, Any], reply: Mapping[str, Any], baited: Mapping[str, Any], limits: Limits
) -> dict[Wall, list[str]]:
    def said(*pairs: tuple[Any, str]) -> list[str]:
        return [text for is_open, text in pairs if is_open]

    is_watched = reply["peak_bytes"] > 0 or "cgroup memory" in reply["layers"]
    disk_mib = facts["disk_bytes"] / MIB
    return {
        "filesystem": said(
            (facts["reads"], "files of the host can be read"),
            (facts["changes"], "permissions and times of the host's files can be changed"),
            (facts["writes"], f"it can write to {', '.join(facts['writes'])}"),
        ),
        "network": said(
            (facts["connects"], "a server of the host was reached"),
            (facts["connects_abstract"], "an abstract socket of the host was reached"),
        ),
        "processes": said(
            (facts["signals"], "processes of the host can be signalled"),
            (_is_alive(baited["name"]), "a process outlived its program"),
            (
                not facts["lost"] and facts["forks"] > 2,
                "whether a process can outlive its program was not seen",
            ),
        ),
        "privileges": said(
            (facts["is_root"], "programs run as root"),
            (facts["gains_privileges"], "privileges can be gained"),
            (not facts["has_filter"], "system calls are not filtered"),
            (facts["makes_namespaces"] or facts["changes_root"], "namespaces can be made"),
        ),
        "memory": said(
            (facts["allocates"], "one process passed the limit"),
            (not is_watched, "the memory of all processes together is not seen"),
        ),
        "process_count": said(
            (facts["forks"] > limits.max_processes, f"{facts['forks']} processes were started")
        ),
        "disk": said(
            (facts["grows_file"], "a file passed the limit"),
            (disk_mib > 1.01 * limits.disk_mib + 1, "all files together are not limited"),
        ),
    }


def _is_alive(name: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            if path.read_text(encoding="utf-8", errors="replace").strip() == name:
                return True
        except OSError:
            continue
    return False
