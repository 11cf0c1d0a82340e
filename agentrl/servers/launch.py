"""Command line and environment of each kind of server."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Protocol, cast

from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.rollout import RolloutConfig, SGLangServerConfig
from agentrl.errors import ConfigError
from agentrl.registered import required
from agentrl.servers.weight_changes import CHANGES_LOADER, LOADER_FOLDER


class Launcher(Protocol):
    """Describes how to start a server. The supervisor starts it in a process group of its own.

    A kind of servers registers a class in `agentrl.servers`, by its name in `rollout.backend`: with
    `of(rollout, model, api_key=...)`, which returns a launcher, and `check(rollout)`, which raises
    ConfigError if this machine cannot start it.

    If `api_key` is set, the process reads the key from the first line of its standard input and requires it
    in every request.
    """

    @property
    def api_key(self) -> str | None: ...

    def command(self, model_path: str, *, weight_version: str, host: str, port: int) -> list[str]: ...

    def environment(self) -> Mapping[str, str]:
        """Return variables to add to this process's environment."""


@dataclass(frozen=True, slots=True)
class SGLangServer:
    """A real SGLang server. A small guard process kills it when the process that started it is gone."""

    config: SGLangServerConfig
    dtype: str
    api_key: str | None = field(default=None, repr=False)
    trust_remote_code: bool = False
    lora: LoRAConfig | None = None
    is_colocated: bool = False
    records_experts: bool = False
    loads_changes: bool = False

    @classmethod
    def of(cls, rollout: RolloutConfig, model: ModelConfig, *, api_key: str | None) -> SGLangServer:
        return cls(
            rollout.sglang,
            model.dtype,
            api_key,
            model.trust_remote_code,
            model.lora if rollout.weights.adapter == "alone" else None,
            rollout.colocated,
            rollout.replay_experts,
            rollout.weights.delta,
        )

    @staticmethod
    def check(rollout: RolloutConfig) -> None:
        """Raise ConfigError if SGLang is not installed, or rollout.sglang.python is no program."""
        python = rollout.sglang.python
        if python is not None and shutil.which(python) is None:
            raise ConfigError(
                f"rollout.sglang.python={python!r} is no program; set the Python of an environment with "
                "SGLang"
            )
        if python is None and find_spec("sglang") is None:
            raise ConfigError(
                "rollout.backend=sglang: SGLang is not installed here; pip install 'agentrl[sglang]', set "
                "rollout.sglang.python to the Python of an environment with it, or use "
                "rollout.backend=embedded"
            )

    def command(self, model_path: str, *, weight_version: str, host: str, port: int) -> list[str]:
        options: dict[str, Any] = {
            "model_path": model_path,
            "host": host,
            "port": port,
            "dtype": self.dtype,
            "weight_version": weight_version,
            "trust_remote_code": self.trust_remote_code,
            **(_lora_options(self.lora) if self.lora is not None else {}),
            **({"enable_return_routed_experts": True} if self.records_experts else {}),
            # Keep a copy of the weights in host memory: an adapter and a file of changes both need the base.
            **({"enable_memory_saver": True, "enable_weights_cpu_backup": True} if self.is_colocated else {}),
            **self.config.args,
        }
        if self.loads_changes:
            own = options.get("custom_weight_loader") or ()
            options["custom_weight_loader"] = [*([own] if isinstance(own, str) else own), CHANGES_LOADER]
        guard = [sys.executable, "-m", "agentrl.guard", "--parent-pid", str(os.getpid())]
        if self.api_key is not None:
            guard += ["--api-key-stdin"]
        return [
            *guard,
            "--",
            self.config.python or sys.executable,
            "-m",
            "sglang.launch_server",
            *as_options(options),
        ]

    def environment(self) -> Mapping[str, str]:
        # Otherwise the tokens of a prompt with images would be decoded, and made anew from the text.
        own = {"SGLANG_MM_AVOID_RETOKENIZE": "1", **self.config.env}
        if not self.loads_changes:
            return own
        path = self.config.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        return {**own, "PYTHONPATH": os.pathsep.join(filter(None, [path, str(LOADER_FOLDER)]))}


def launcher(rollout: RolloutConfig, model: ModelConfig, *, api_key: str | None) -> Launcher:
    """Return the launcher for `rollout.backend`; its servers require `api_key`."""
    return cast(Launcher, _kind_of(rollout).of(rollout, model, api_key=api_key))


def check_backend(rollout: RolloutConfig) -> None:
    """Raise if this machine cannot start servers of `rollout.backend`.

    Raises:
        ConfigError: they are not installed, or a setting of theirs names no program.
    """
    if rollout.num_started:
        _kind_of(rollout).check(rollout)


def _kind_of(rollout: RolloutConfig) -> Any:
    return required("agentrl.servers", rollout.backend, by=f"rollout.backend={rollout.backend}")


def _lora_options(lora: LoRAConfig) -> dict[str, Any]:
    """Return SGLang's options for loading the policy's adapter at run time.

    `max_loras_per_batch` is one more than there are adapters, because SGLang counts the base weights as one.
    """
    modules = list(lora.target_modules) or ["all"]
    return {
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": modules,
        "max_loras_per_batch": 2 + len(lora.roles),
    }


def as_options(values: Mapping[str, Any]) -> list[str]:
    """Convert `{name: value}` to command-line options.

    True becomes a bare flag, None and False are omitted, and a list follows its option as several words.
    """
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.extend(str(item) for item in (value if isinstance(value, (list, tuple)) else [value]))
    return words
