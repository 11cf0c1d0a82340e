"""A host process of its own: plays programs in the sandbox, as the user and with the walls that the test
wants. JSON in, JSON out.

Input: programs (name -> source), bait, limits, missing (what the host may not do), allow. Output: results by
name, the report line, what was left below this process.
"""

import ctypes
import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import trio

from agentrl.extras.sandbox import Limits, Program, Sandbox, SandboxOptions
from agentrl.extras.sandbox.launcher import kernel, seccomp

PR_SET_CHILD_SUBREAPER = 36


def children() -> list[str]:
    """Return the names of processes below this one, after a moment for those that were just killed."""
    for _ in range(50):
        pids = [
            p
            for t in os.listdir("/proc/self/task")
            for p in Path(f"/proc/self/task/{t}/children").read_text().split()
        ]
        names = [Path(f"/proc/{pid}/stat").read_text() for pid in pids if Path(f"/proc/{pid}").exists()]
        if not names:
            return []
        time.sleep(0.05)
    return names


async def play(request: dict) -> dict:
    options = SandboxOptions(
        Limits(**request["limits"]), tuple(request["allow"]), packages=False, max_concurrent=6
    )
    sandbox = Sandbox(options)
    report = str(await trio.to_thread.run_sync(sandbox.check))
    bait = {**request["bait"], "pid": os.getpid()}
    results = {}

    async def run(name: str, source: str) -> None:
        descriptor, path = tempfile.mkstemp()
        os.close(descriptor)
        result = await sandbox.run(Program(source, stdin=json.dumps(bait), workspace=Path(path)))
        results[name] = dataclasses.asdict(result) | {"workspace_bytes": os.path.getsize(path)}
        if os.path.getsize(path) > 100:  # it left files: they must not stop the next program
            after = await sandbox.run(Program("print(6 * 7)", workspace=Path(path)))
            results[name]["after"] = after.stdout
        os.unlink(path)

    async with trio.open_nursery() as nursery:
        for name, source in request["programs"].items():
            nursery.start_soon(run, name, source)
    await run("good", "open('kept', 'w').write('x'); print(6 * 7)")
    return {
        "report": report,
        "results": results,
        "left": children(),
        "temporary": os.listdir(tempfile.gettempdir()),
    }


def as_in_a_container(missing: list[str]) -> None:
    """Take from this process and its children what a container runtime takes: the privilege to mount, the
    call `unshare`.
    """
    if "CAP_SYS_ADMIN" in missing:
        kernel.prctl(kernel.PR_CAPBSET_DROP, 21)
    if "unshare" in missing:
        number = {"x86_64": 272, "aarch64": 97}[kernel.machine()]
        load, equal, give = 0x20, 0x15, 0x06
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        seccomp.install_filter(
            [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, 0x50001), (give, 0, 0, 0x7FFF0000)]
        )


if __name__ == "__main__":
    given = json.load(sys.stdin)
    as_in_a_container(given["missing"])
    ctypes.CDLL(None).prctl(
        PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # what outlives its program becomes a child of this process
    sys.stdout.write(json.dumps(trio.run(play, given)))
