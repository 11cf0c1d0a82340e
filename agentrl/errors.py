"""The tree of errors: each names the boundary that failed.

AgentRLError
├── UserError                 exit code 2: the input is wrong; the message says what, the value, what would be right
│   ├── ConfigError           a key, a value, a file of the config
│   ├── DataError             a dataset file, row or field
│   └── PluginError           an unknown or malformed agent, tool, interaction or reward
└── InfrastructureError       exit code 1: the world failed; never a wrong answer of the policy
    ├── ServerError           an inference server: `status` is its HTTP status, None if there was no reply
    │   └── RequestRefused    the server called the request wrong (4xx): trying again is useless
    ├── ToolError             a tool or an interaction broke (not: the model called it wrongly)
    ├── RewardError           a reward raised or ran out of time
    ├── SandboxError          the sandbox broke (not: the program in it failed)
    ├── LearnerError          a learner rank was lost, its collective timed out, or its numbers are not finite
    ├── DiskError             a file could not be written: the disk is full, read-only or gone
    └── CheckpointError       a checkpoint is missing, incomplete or could not be written
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class AgentRLError(Exception):
    """Root of all errors this project raises on purpose."""

    exit_code = 1


class UserError(AgentRLError):
    exit_code = 2


class ConfigError(UserError):
    pass


class DataError(UserError):
    pass


class PluginError(UserError):
    pass


@contextmanager
def concerning(what: str) -> Iterator[None]:
    """Put `what` (a config key, a file) before the message of the user's errors that leave the block."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{what}: {error}") from error


class InfrastructureError(AgentRLError):
    pass


class ServerError(InfrastructureError):
    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[object, ...]:  # keyword-only arguments do not survive Ray's pickling by default
        return (_rebuild_server_error, (type(self), str(self), self.status))


class RequestRefused(ServerError):
    pass


class ToolError(InfrastructureError):
    pass


class RewardError(InfrastructureError):
    pass


class SandboxError(InfrastructureError):
    pass


class LearnerError(InfrastructureError):
    pass


class RankLost(LearnerError):
    """The process of a rank died; those that are left are of no use without it."""


class DiskError(InfrastructureError):
    pass


class CheckpointError(InfrastructureError):
    pass


class JournalError(InfrastructureError):
    """The replay buffer's journal could not be written, and nothing has changed: the same call may be made again."""


def _rebuild_server_error(cls: type[ServerError], message: str, status: int | None) -> ServerError:
    return cls(message, status=status)
