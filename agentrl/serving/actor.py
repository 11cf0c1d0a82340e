"""The Ray actor that owns one inference server: a thin shell around its supervisor."""

from __future__ import annotations

from pathlib import Path

import ray

from agentrl.config.model import ModelConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.serving.health import ServerStatus
from agentrl.serving.launch import launcher
from agentrl.serving.supervisor import Supervisor


# Several threads: `status` and `stop` must be answered while `start` waits for the model to load.
@ray.remote(num_cpus=0, max_concurrency=4)  # type: ignore[call-overload]  # ray's stubs lack max_concurrency
class ServerActor:
    """Starts and supervises one server of the kind `rollout.backend`.

    The server's log is `run_dir/servers/<name>.log`. It requires `api_key` in every request.

    Args:
        is_open: listen on the node's IP address, for other machines; otherwise on 127.0.0.1 only.
    """

    def __init__(self, name: str, rollout: RolloutConfig, model: ModelConfig, *, run_dir: str, api_key: str, is_open: bool = False) -> None:
        self._supervisor = Supervisor(
            launcher(rollout, model, api_key=api_key),
            log_file=Path(run_dir) / "servers" / f"{name}.log",
            start_timeout_s=rollout.server_start_timeout_s,
            max_restarts=rollout.max_server_restarts,
            hang_timeout_s=rollout.server_hang_timeout_s,
            kind=rollout.backend,
            host=ray.util.get_node_ip_address() if is_open else "127.0.0.1",
        )

    def start(self, model_path: str, weight_version: str) -> str:
        """Start the server and return its URL once it generates.

        Raises:
            ServerError: the server did not start; the message ends with the tail of its log.
        """
        return self._supervisor.start(model_path, weight_version)

    def status(self) -> ServerStatus:
        return self._supervisor.status()

    def mark_ready(self, url: str) -> None:
        self._supervisor.mark_ready(url)

    def restart(self, url: str) -> None:
        self._supervisor.restart(url)

    def stop(self) -> None:
        self._supervisor.stop()
