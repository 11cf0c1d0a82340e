"""Options of environments with a box: which back end, how many boxes, and the limits of each."""

from __future__ import annotations

import functools
from typing import Literal

from pydantic import Field

from agentrl.boxes.pool import BoxPool
from agentrl.boxes.process_box import ProcessBoxes
from agentrl.plugins.options import Options
from agentrl.sandbox import Limits, Sandbox, SandboxOptions, Wall

BoxKind = Literal["process"]


class WorkspaceOptions(Options):
    """Options in `agent.environment_config.workspace` and `agent.environment_config.repository`."""

    kind: BoxKind = Field("process", description="Where boxes run.")
    max_boxes: int = Field(
        16, ge=1, description="Boxes at a time in each rollout process; further attempts wait in their start."
    )
    command_timeout_s: float = Field(
        20.0, gt=0, description="Deadline of a command; keep it below agent.tool_timeout_s."
    )
    output_kib: int = Field(32, ge=1, description="Output of a command that is kept; the middle is left out.")
    lifetime_s: float = Field(3600.0, gt=0, description="A box that is older is ended.")
    cpu_s: float = Field(600.0, gt=0, description="CPU seconds of a box, over all of its processes.")
    memory_mib: int = Field(2048, ge=256, description="Memory of a box, its files included.")
    max_processes: int = Field(64, ge=4, description="Processes and threads of a box.")
    disk_mib: int = Field(256, ge=1, description="Files of a box.")
    max_files: int = Field(20_000, ge=16, description="Files and folders of a box.")
    allow_unprotected: tuple[Wall, ...] = Field(
        (), description="Walls of the sandbox that may be missing on this machine (docs/sandbox.md)."
    )


@functools.lru_cache(maxsize=64)
def open_pool(options: WorkspaceOptions) -> BoxPool:
    """Return this process's one pool with these options, after its back end was checked.

    Raises:
        ConfigError: the back end is not installed, or does not isolate.
    """
    limits = Limits(
        cpu_s=options.cpu_s,
        wall_s=options.lifetime_s,
        memory_mib=options.memory_mib,
        max_processes=options.max_processes,
        file_mib=options.disk_mib,
        disk_mib=options.disk_mib,
        max_files=options.max_files,
        max_open_files=1024,
    )
    maker = ProcessBoxes(Sandbox(SandboxOptions(limits, allow_unprotected=options.allow_unprotected)))
    maker.check()
    return BoxPool(maker, max_boxes=options.max_boxes)
