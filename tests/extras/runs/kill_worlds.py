"""An environment and a reward that chaos.py gives a run, so that it has a hub process and programs in the
sandbox.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import agentrl.plugins as rl
from agentrl.errors import RewardError, SandboxError
from agentrl.extras.hubs.process import HubProgram, hub_process
from agentrl.extras.sandbox import Program, open_sandbox, read_options

SERVER = (sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1")


class KillHub(rl.Environment):
    """Asks a hub process for the server that it keeps."""

    name: ClassVar[str] = "kill_hub"

    async def start(self, **environment_kwargs: Any) -> None:
        program = HubProgram("kill_hub", sys.executable, "agentrl_server.py")
        await hub_process(program).call("url", {"command": list(SERVER), "health": "/"})


class KillSandbox(rl.Reward):
    """Runs a program in the sandbox for half a second."""

    name: ClassVar[str] = "kill_sandbox"
    runs_in = "trio"

    async def score(self, attempt: rl.Attempted) -> rl.RewardResult:  # type: ignore[override]
        program = Program("import time; time.sleep(0.5)")
        try:
            result = await open_sandbox(read_options({}, key=self.name)).run(program)
        except SandboxError as error:
            raise RewardError(f"reward {self.name!r}: {error}") from error
        return rl.RewardResult(float(result.is_ok))
