"""A stored LoRA adapter in peft's folder format: where it is, and whether a config continues it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.config.model import LoRAConfig
from agentrl.config.storage_urls import is_url
from agentrl.data.hub import HubError, download
from agentrl.data.storage import local_folder
from agentrl.errors import ConfigError, concerning

KEY = "model.lora.path"
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "exclude_modules": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    # PiSSA, OLoRA, CorDA and LoftQ change the base weights, without which the adapter means something else.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Keys of adapter_config.json with the values of a plain adapter, the only kind that the learner trains."""


class _Described(BaseModel):
    """What is read of adapter_config.json."""

    model_config = ConfigDict(extra="allow")

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    base_model_name_or_path: str | None = None


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter of a folder. target_modules: names of layers, sorted; (): all linear ones.

    base: the model that it was trained on, as its author's machine named it; None: not recorded.
    """

    folder: Path
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base: str | None

    @property
    def as_config(self) -> str:
        """The keys of `model.lora` that continue it, as on a command line."""
        modules = f", target_modules: [{', '.join(self.target_modules)}]" if self.target_modules else ""
        return f"model.lora={{path: {self.folder}, rank: {self.rank}, alpha: {self.alpha:g}{modules}}}"


def resolve_adapter(config: LoRAConfig) -> LoRAConfig:
    """Return the config with a hub id or URL replaced by a local folder; unchanged without a path.

    Raises:
        ConfigError: there is no such adapter, it is not a plain LoRA adapter, or the config has another
            rank, alpha or other target modules.
    """
    if not config.path:
        return config
    stored = read_adapter(_find(config.path))
    own = {
        "rank": (config.rank, stored.rank),
        "alpha": (config.alpha, stored.alpha),
        "target_modules": (sorted(config.target_modules), sorted(stored.target_modules)),
    }
    for name, (wanted, found) in own.items():
        if wanted != found:
            raise ConfigError(
                f"{KEY}: the adapter has {name} {_shown(found)}, and model.lora.{name} is {_shown(wanted)}; "
                f"use {stored.as_config}"
            )
    return config.model_copy(update={"path": str(stored.folder)})


def read_adapter(folder: Path) -> StoredAdapter:
    """Return what `adapter_config.json` says.

    Raises:
        ConfigError: the folder has no adapter, or its adapter is not a plain LoRA adapter.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{KEY}={str(folder)!r} is not the folder of an adapter: it has no {name}; peft's "
                "save_pretrained writes one"
            )
    file = folder / CONFIG_FILE
    try:
        described = _Described.model_validate_json(file.read_bytes())
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        what = f"{where}: {error.errors()[0]['msg']}" if where else error.errors()[0]["msg"]
        raise ConfigError(f"{KEY}: {file} does not describe a LoRA adapter: {what}") from None
    values = described.model_extra or {}
    for name, plain in _PLAIN.items():
        if name in values and values[name] not in plain:
            raise ConfigError(
                f"{KEY}: {file} has {name}={values[name]!r}, which the learner does not train; it continues "
                f"plain LoRA adapters ({name}={plain[0]!r})"
            )
    return StoredAdapter(
        folder.absolute(),
        described.r,
        described.lora_alpha,
        _modules(described.target_modules, file),
        described.base_model_name_or_path,
    )


def _modules(named: list[str] | str, file: Path) -> tuple[str, ...]:
    if isinstance(named, list):
        return tuple(sorted(named))
    if named == ALL_LINEAR:
        return ()
    raise ConfigError(
        f"{KEY}: {file} has target_modules={named!r}, a pattern; the learner takes names of layers: write "
        "them as a list"
    )


def _find(path: str) -> Path:
    """Return the local folder of an adapter."""
    if is_url(path):
        with concerning(KEY):
            return local_folder(path)
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser()
    if not _HUB_ID.fullmatch(path):
        raise ConfigError(f"{KEY}={path!r}: no such folder, and not a hub id either (owner/name)")
    try:
        return download("model", path, None, [CONFIG_FILE, WEIGHTS_FILE])
    except HubError as error:
        raise ConfigError(f"{KEY}={path!r} cannot be loaded: {error}") from None


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else f"{value}"
