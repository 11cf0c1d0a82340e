"""Ray's lifetime within a run."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import ray

from agentrl import heap
from agentrl.cluster.call_events import keep_call_events
from agentrl.cluster.folder import in_drivers_folder
from agentrl.cluster.niceness import measure_nodes, starving
from agentrl.cluster.ray_processes import ending_what_began, leaving_nothing, local_processes, watching_ray
from agentrl.cluster.user_files import shipped
from agentrl.config.cluster import MIN_OBJECT_STORE_BYTES, ClusterConfig
from agentrl.errors import InfrastructureError
from agentrl.granted import Granted, granted
from agentrl.interrupts import SIGNALS

SHARED_MEMORY = "/dev/shm"
NODES_TIMEOUT_S = 1200.0
"""A cloud needs minutes to start a machine."""
NODES_POLL_S = 1.0
OBJECT_STORE_SHARE = 0.3
"""Share of the memory, as Ray chooses it by default."""


@contextmanager
def ray_session(
    config: ClusterConfig, user_files: Sequence[str] = (), *, keeps_call_events: bool = False
) -> Iterator[str]:
    """Start Ray on this machine, or join the cluster at `cluster.address`; end or leave it afterwards.

    Yields a one-line summary of its resources. `user_files` are shipped to all workers on all machines, where
    `agentrl.plugins.locate` finds them. `keeps_call_events`: for `ray.timeline`. If Ray is already
    initialized in this process, it is used as it is, without these files, and not shut down.

    Raises:
        InfrastructureError: Ray does not start, nothing answers at the address, or fewer than
            `cluster.num_nodes` nodes joined in time.
    """
    # Ray's workers read these at import: no usage reports; CUDA_VISIBLE_DEVICES is kept without GPUs.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    keep_call_events(keeps_call_events)
    for name, value in heap.FEW.items():
        os.environ.setdefault(name, value)
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            with shipped(user_files) as runtime_env, _keeping_signals(), ending_what_began():
                _start(config, runtime_env)
        except Exception as error:  # boundary: Ray raises a bare Exception if its processes start slowly
            where = (
                f"no Ray cluster answers at cluster.address={config.address!r}"
                if config.address
                else "Ray could not be started on this machine"
            )
            raise InfrastructureError(f"{where}: {str(error).strip().splitlines()[0]}") from error
    try:
        with leaving_nothing() if local_processes() else nullcontext(), watching_ray():
            _wait_for_nodes(config.num_nodes or 0)
            yield _in_words(config)
    finally:
        if is_ours:
            ray.shutdown()


def _start(config: ClusterConfig, runtime_env: dict[str, Any] | None) -> None:
    # "local": else Ray would join a cluster of RAY_ADDRESS or an earlier `ray start`
    if config.address is None:
        grant, free_bytes = granted(), shutil.disk_usage(SHARED_MEMORY).free
        where: dict[str, Any] = {
            "address": "local",
            "runtime_env": runtime_env,
            "num_cpus": config.num_cpus or grant.num_cpus,
            "object_store_memory": config.object_store_bytes or object_store_bytes(grant, free_bytes),
            "include_dashboard": False,
            "_system_config": {"worker_niceness": config.niceness},
        }
    else:
        where = {"address": config.address, "runtime_env": in_drivers_folder(runtime_env)}
    ray.init(**where, log_to_driver=False, logging_level=logging.ERROR, namespace="agentrl")


def object_store_bytes(grant: Granted, free_bytes: int) -> int | None:
    """Return the size of the object store in bytes; None: Ray's default is right.

    Ray's default counts the machine's memory, which is wrong if a container or job is granted less.

    Args:
        free_bytes: free bytes of the shared memory of the store; Ray refuses to start with a larger store.
    """
    if grant.memory_bytes >= grant.machine_memory_bytes:
        return None
    return max(
        MIN_OBJECT_STORE_BYTES, min(int(OBJECT_STORE_SHARE * grant.memory_bytes), int(0.95 * free_bytes))
    )


def _wait_for_nodes(num_nodes: int) -> None:
    deadline = time.monotonic() + NODES_TIMEOUT_S
    while (found := sum(node["Alive"] for node in ray.nodes())) < num_nodes:
        if time.monotonic() > deadline:
            raise InfrastructureError(
                f"{found} of cluster.num_nodes={num_nodes} nodes joined the cluster within "
                f"{NODES_TIMEOUT_S:g} s"
            )
        time.sleep(NODES_POLL_S)


def _in_words(config: ClusterConfig) -> str:
    if config.address is not None:
        amounts = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus, gpus = (sum(held.get(kind, 0.0) for held in amounts) for kind in ("CPU", "GPU"))
        text = f"Ray at {config.address}: {len(amounts)} node(s), {cpus:g} CPUs, {gpus:g} GPUs"
        warning = starving(measure_nodes())
        return text if warning is None else f"{text}; {warning}"
    grant, num_cpus = granted(), int(ray.cluster_resources().get("CPU", 0))
    source = "cluster.num_cpus" if config.num_cpus is not None else grant.cpu_source
    why = "" if num_cpus == grant.machine_cpus else f" (of {grant.machine_cpus}; {source})"
    return f"Ray: {num_cpus} CPUs{why}"


@contextmanager
def _keeping_signals() -> Iterator[None]:
    """Restore the previous signal handlers after the block.

    Ray's start replaces the handler of SIGTERM by one that raises SystemExit.
    """
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    except SystemExit as error:
        raise (KeyboardInterrupt if error.code == signal.SIGTERM else error) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in kept.items():
                if callable(handler):
                    signal.signal(number, handler)
