"""Servers of frozen models in one process without Ray: for evaluations and `agentrl play`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.frozen_servers import FrozenPlan
from agentrl.errors import ServerError
from agentrl.servers.health import ServerStatus
from agentrl.servers.launch import launcher
from agentrl.servers.supervisor import Supervisor

UNPUBLISHED = "0"
"""Version that the servers report of weights that they were started with."""


@dataclass(frozen=True, slots=True)
class StartedFrozen:
    """The servers that this process started for frozen models. A server that dies is started again.

    supervisors: by config key of the model.
    """

    supervisors: Mapping[str, list[Supervisor]] = field(default_factory=dict)
    api_key: str = field(default="", repr=False)

    def keys(self) -> dict[str, dict[str, str | None]]:
        """Return by config key of a model: URL -> API key of its servers that may be asked.

        Raises:
            ServerError: a server failed for good.
        """
        return {
            key: dict.fromkeys(self._up(key, [one.status() for one in watched]), self.api_key)
            for key, watched in self.supervisors.items()
        }

    @staticmethod
    def _up(key: str, statuses: Sequence[ServerStatus]) -> list[str]:
        for status in statuses:
            if status.state == "failed":
                raise ServerError(f"a server of {key} failed permanently: {status.message}")
        return [status.url for status in statuses if status.state in ("needs_weights", "ready")]


@contextmanager
def start_frozen(
    plans: Sequence[FrozenPlan], folder: Path, *, say: Callable[[str], None]
) -> Iterator[StartedFrozen]:
    """Start the servers of all plans, and stop them afterwards. Their logs are written to `folder`.

    Raises:
        ServerError: a server does not start.
    """
    started = StartedFrozen({plan.key: [] for plan in plans}, secrets.token_urlsafe(32))
    with ExitStack() as stack:
        for plan in plans:
            rollout = plan.rollout
            say(
                f"starting {rollout.num_started} {rollout.backend} server(s) of {plan.key}: {plan.model.path}"
            )
            began = time.monotonic()
            for index in range(rollout.num_started):
                supervisor = Supervisor(
                    launcher(rollout, plan.model, api_key=started.api_key),
                    log_file=folder / f"{plan.name}_{index}.log",
                    start_timeout_s=rollout.server_start_timeout_s,
                    hang_timeout_s=rollout.server_hang_timeout_s,
                    max_restarts=rollout.max_server_restarts,
                )
                stack.callback(supervisor.stop)
                supervisor.start(plan.model.path, UNPUBLISHED)
                started.supervisors[plan.key].append(supervisor)
            say(f"started in {time.monotonic() - began:.0f} s")
        yield started
