"""Runs code that a model wrote: one process per program, behind walls that a self-test has verified."""

from agentrl.extras.sandbox.limits import WALLS, Limits, SandboxOptions, Wall, read_options
from agentrl.extras.sandbox.protections import Protections
from agentrl.extras.sandbox.result import SandboxResult
from agentrl.extras.sandbox.running import RunningProgram
from agentrl.extras.sandbox.sandbox import Program, Sandbox, open_sandbox, sandbox_reports

__all__ = [
    "WALLS",
    "Limits",
    "Program",
    "Protections",
    "RunningProgram",
    "Sandbox",
    "SandboxOptions",
    "SandboxResult",
    "Wall",
    "open_sandbox",
    "read_options",
    "sandbox_reports",
]
