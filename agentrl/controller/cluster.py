"""Ray for the length of a run, and signals that end it cleanly."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import ray

from agentrl.config.cluster import MIN_OBJECT_STORE_BYTES, ClusterConfig
from agentrl.controller.shipping import shipped
from agentrl.errors import InfrastructureError
from agentrl.granted import Granted, granted

SHARED_MEMORY = "/dev/shm"
OBJECT_STORE_SHARE = 0.3
"""Ray's own share of the memory."""


@contextmanager
def ray_session(config: ClusterConfig, user_files: Sequence[str] = ()) -> Iterator[str]:
    """Start Ray on this machine, or join the cluster of `cluster.address`; leave it (or end it) at the end. Yields what it has, in a line.

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
        yield _in_words(config)
    finally:
        if is_ours:
            ray.shutdown()


def _start(config: ClusterConfig, runtime_env: dict[str, Any] | None) -> None:
    # "local": without an address, Ray would join one that RAY_ADDRESS or an earlier `ray start` names.
    where = {"address": config.address} if config.address is not None else {"address": "local"} | _resources(config, granted())
    ray.init(**where, log_to_driver=False, logging_level=logging.ERROR, namespace="agentrl", runtime_env=runtime_env)


def _resources(config: ClusterConfig, grant: Granted) -> dict[str, Any]:
    """Return what a Ray of this machine has, in Ray's terms."""
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    return {
        "num_cpus": config.num_cpus or grant.num_cpus,
        "object_store_memory": config.object_store_bytes or object_store_bytes(grant, free_bytes),
        "include_dashboard": False,
    }


def object_store_bytes(grant: Granted, free_bytes: int) -> int | None:
    """Return the size of the object store where less memory is granted than the machine has; None: Ray's own rule sees it rightly.

    Args:
        free_bytes: of the shared memory that the store lies in; Ray refuses to start with a larger one.
    """
    if grant.memory_bytes >= grant.machine_memory_bytes:
        return None
    return max(MIN_OBJECT_STORE_BYTES, min(int(OBJECT_STORE_SHARE * grant.memory_bytes), int(0.95 * free_bytes)))


def _in_words(config: ClusterConfig) -> str:
    if config.address is not None:
        amounts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus, gpus = (sum(held.get(kind, 0.0) for held in amounts) for kind in ("CPU", "GPU"))
        return f"Ray at {config.address}: {len(amounts)} node(s), {cpus:g} CPUs, {gpus:g} GPUs"
    grant, num_cpus = granted(), int(ray.cluster_resources().get("CPU", 0))
    source = "cluster.num_cpus" if config.num_cpus is not None else grant.cpu_source
    why = "" if num_cpus == grant.machine_cpus else f" (of {grant.machine_cpus}; {source})"
    return f"Ray: {num_cpus} CPUs{why}"


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
