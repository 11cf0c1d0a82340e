"""The error tree. Each class names the boundary that failed.

AgentRLError
├── UserError                 exit code 2: the input is wrong; the message says what is wrong, the value, and
the cure
│   ├── ConfigError           a key, a value or a file of the config
│   ├── DataError             a dataset file, row or field
│   └── PluginError           an unknown or malformed agent, tool, interaction, environment or reward
└── InfrastructureError       exit code 1: something outside the policy failed; never a wrong answer of the
    policy ├── ServerError           an inference server failed; `status` is its HTTP status, None if there
    was no reply
    │   └── RequestRefused    the server rejected the request (4xx): a retry would fail too
    ├── ToolError             a tool or an interaction broke (not: the model called it wrongly)
    ├── EnvironmentFailed     the environment of an attempt raised or timed out
    ├── RewardError           a reward raised or timed out
    ├── SandboxError          the sandbox broke (not: the program in it failed)
    ├── LearnerError          a learner rank failed, a collective timed out, or its numbers are not finite
    │   └── RankLost          the process of a rank died
    ├── ActorDied             the process of an actor died
    ├── DiskError             a file could not be written: the disk is full, read-only or gone
    ├── StorageError          object storage refused, could not be reached, or returned other bytes
    ├── CheckpointError       a checkpoint is missing, incomplete or could not be written
    └── JournalError          the replay buffer's journal could not be written
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
    """Prefix the message of a UserError raised in the block with `what` (a config key, a file)."""
    try:
        yield
    except UserError as error:
        raise type(error)(f"{what}: {error}") from error


class InfrastructureError(AgentRLError):
    pass


class ActorDied(InfrastructureError):
    pass


class ServerError(InfrastructureError):
    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(
        self,
    ) -> tuple[object, ...]:  # keyword-only arguments do not survive Ray's pickling by default
        return (_rebuild_server_error, (type(self), str(self), self.status))


class RequestRefused(ServerError):
    pass


class ToolError(InfrastructureError):
    pass


class EnvironmentFailed(InfrastructureError):
    pass


class RewardError(InfrastructureError):
    pass


class SandboxError(InfrastructureError):
    pass


class LearnerError(InfrastructureError):
    pass


class RankLost(LearnerError):
    """The process of a rank died. The other ranks cannot continue without it."""


class DiskError(InfrastructureError):
    pass


class StorageError(InfrastructureError):
    pass


class CheckpointError(InfrastructureError):
    pass


class JournalError(InfrastructureError):
    """The replay buffer's journal could not be written.

    The state is unchanged, so the call can be retried.
    """


def _rebuild_server_error(cls: type[ServerError], message: str, status: int | None) -> ServerError:
    return cls(message, status=status)
