"""How each kind of server is started: command line and environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.rollout import EmbeddedServerConfig, RolloutConfig, SGLangServerConfig
from agentrl.plugins.sources import locate


class Launcher(Protocol):
    """Says how to start a server; the supervisor starts it, in a process group of its own.

    With `api_key`, the command reads it from the first line of its standard input, and asks for it in every request.
    """

    @property
    def api_key(self) -> str | None: ...

    def command(self, model_path: str, *, weight_version: str, host: str, port: int) -> list[str]: ...

    def environment(self) -> Mapping[str, str]:
        """Return variables to add to this process's environment."""


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """The server of this project; it ends by itself when its starter is gone."""

    config: EmbeddedServerConfig
    dtype: str
    api_key: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    external_lib: str | None = None

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
        return [sys.executable, "-m", "agentrl.serving.embedded", model_path, *as_options(options)]

    def environment(self) -> Mapping[str, str]:
        return {"OMP_NUM_THREADS": str(self.config.threads)}


@dataclass(frozen=True, slots=True)
class SGLangServer:
    """A real SGLang, behind a small guard process that takes it down when its starter is gone."""

    config: SGLangServerConfig
    dtype: str
    api_key: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    lora: LoRAConfig | None = None
    is_colocated: bool = False

    def command(self, model_path: str, *, weight_version: str, host: str, port: int) -> list[str]:
        options: dict[str, Any] = {
            "model_path": model_path,
            "host": host,
            "port": port,
            "dtype": self.dtype,
            "weight_version": weight_version,
            "trust_remote_code": self.trust_remote_code,
            **(_lora_options(self.lora) if self.lora is not None else {}),
            # A copy of the weights stays in host memory: an adapter, or changed bytes alone, come to weights that must be there.
            **({"enable_memory_saver": True, "enable_weights_cpu_backup": True} if self.is_colocated else {}),
            **self.config.args,
        }
        guard = [sys.executable, "-m", "agentrl.guard", "--parent-pid", str(os.getpid())]
        if self.api_key is not None:
            guard += ["--api-key-stdin"]
        return [*guard, "--", self.config.python or sys.executable, "-m", "sglang.launch_server", *as_options(options)]

    def environment(self) -> Mapping[str, str]:
        return self.config.env


def launcher(rollout: RolloutConfig, model: ModelConfig, *, api_key: str | None) -> Launcher:
    """Return the launcher that `rollout.backend` names, of servers that ask for `api_key`."""
    if rollout.backend == "embedded":
        library = model.external_lib
        if library is not None and library.endswith(".py"):
            library = str(locate(library).absolute())  # a copy that was shipped to this process, not to the server's
        return EmbeddedServer(rollout.embedded, model.dtype, api_key, model.trust_remote_code, library)
    lora = model.lora if rollout.weights.adapter == "alone" else None
    return SGLangServer(rollout.sglang, model.dtype, api_key, model.trust_remote_code, lora, rollout.colocated)


def _lora_options(lora: LoRAConfig) -> dict[str, Any]:
    """Return SGLang's options that let it load the policy's adapter at run time; the base weights take a place of their own."""
    modules = list(lora.target_modules) or ["all"]
    return {"enable_lora": True, "max_lora_rank": lora.rank, "lora_target_modules": modules, "max_loras_per_batch": 2}


def as_options(values: Mapping[str, Any]) -> list[str]:
    """Write `{name: value}` as command-line options: True is a bare flag, None and False are left out, a list repeats its values."""
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.extend(str(item) for item in (value if isinstance(value, (list, tuple)) else [value]))
    return words
