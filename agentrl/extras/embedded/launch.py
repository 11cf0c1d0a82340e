"""How the embedded server is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.model import ModelConfig
from agentrl.config.rollout import EmbeddedServerConfig, RolloutConfig
from agentrl.plugins.sources import locate
from agentrl.servers.launch import as_options


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """This project's own server. It exits when the process that started it is gone."""

    config: EmbeddedServerConfig
    dtype: str
    api_key: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    external_lib: str | None = None

    @classmethod
    def of(cls, rollout: RolloutConfig, model: ModelConfig, *, api_key: str | None) -> EmbeddedServer:
        library = model.external_lib
        if library is not None and library.endswith(".py"):
            # The copy shipped to this process; the server's process has none.
            library = str(locate(library).absolute())
        return cls(rollout.embedded, model.dtype, api_key, model.trust_remote_code, library)

    @staticmethod
    def check(rollout: RolloutConfig) -> None:
        """It can always be started."""

    def command(self, model_path: str, *, weight_version: str, host: str, port: int) -> list[str]:
        options: dict[str, Any] = {
            "host": host,
            "port": port,
            "dtype": self.dtype,
            "weight_version": weight_version,
            "parent_pid": os.getpid(),
            "api_key_stdin": self.api_key is not None,
            "trust_remote_code": self.trust_remote_code,
            "external_lib": self.external_lib,
            **self.config.model_dump(),
        }
        return [sys.executable, "-m", "agentrl.extras.embedded", model_path, *as_options(options)]

    def environment(self) -> Mapping[str, str]:
        return {"OMP_NUM_THREADS": str(self.config.threads)}
