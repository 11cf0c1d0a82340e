"""Ray for the length of a run, and signals that end it cleanly."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray

from agentrl.config.cluster import ClusterConfig
from agentrl.controller.shipping import shipped
from agentrl.errors import InfrastructureError


@contextmanager
def ray_session(config: ClusterConfig, user_files: Sequence[str] = ()) -> Iterator[None]:
    """Start Ray on this machine, or join the cluster of `cluster.address`; leave it (or end it) at the end.

    `user_files` reach every worker on every machine, where `agentrl.plugins.locate` finds them. A Ray that runs already in this
    process is used as it is, without them.

    Raises:
        InfrastructureError: Ray does not come up, or nothing answers at the address.
    """
    # Ray reads these at import of its workers: no usage reports, and no rewriting of device variables for light actors.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            with shipped(user_files) as runtime_env:
                _start(config, runtime_env)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = (
                f"no Ray cluster answers at cluster.address={config.address!r}" if config.address else "Ray does not start on this machine"
            )
            raise InfrastructureError(f"{where}: {str(error).strip().splitlines()[0]}") from error
    try:
        yield
    finally:
        if is_ours:
            ray.shutdown()


def _start(config: ClusterConfig, runtime_env: dict[str, Any] | None) -> None:
    ray.init(
        address=config.address,
        num_cpus=(config.num_cpus or len(os.sched_getaffinity(0))) if config.address is None else None,
        include_dashboard=False if config.address is None else None,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace="agentrl",
        runtime_env=runtime_env,
    )


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does: by KeyboardInterrupt in the main thread, so that everything is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
