"""Location of a model's files: a local folder, or a hub id or URL, whose files are downloaded once.

All other code (chat, learner, servers) reads a local folder and does not know about hubs. The download, its
cache and its environment variables (`HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`) are those of
`huggingface_hub`, so transformers finds the same files.
"""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.config.model import ModelConfig
from agentrl.config.storage_urls import is_url
from agentrl.data.adapter_source import resolve_adapter
from agentrl.data.hub import HubError, download
from agentrl.data.storage import local_folder
from agentrl.data.weight_files import check_weights
from agentrl.errors import ConfigError, concerning

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = ("*.safetensors",)
_CODE = ("*.py",)
_OTHER_COPIES = ("original/*", "consolidated*")
"""Some models have a second copy of the weights, in their authors' format."""


def resolve_model(model: ModelConfig, *, with_weights: bool = True) -> ModelConfig:
    """Return the config with hub ids replaced by local folders, for model, tokenizer and stored adapter.

    Args:
        with_weights: False downloads no weights, only config and tokenizer files; and nothing of the model
            itself if the tokenizer is elsewhere. This is sufficient to write and read tokens while the model
            is served elsewhere.

    Raises:
        ConfigError: there is no such folder or model, or the hub cannot be reached and the model is not in
            the cache; or the config does not fit the stored adapter.
    """
    if not with_weights and model.tokenizer_path:
        return model.model_copy(update={"tokenizer_path": str(find_tokenizer(model.tokenizer_path))})
    folder = find_model(model, with_weights=with_weights)
    tokenizer = model.tokenizer_path and (
        str(folder) if model.tokenizer_path == model.path else str(find_tokenizer(model.tokenizer_path))
    )
    found = {"path": str(folder.absolute()), "tokenizer_path": tokenizer}
    return model.model_copy(update={**found, "lora": resolve_adapter(model.lora)})


def find_model(model: ModelConfig, *, with_weights: bool = True) -> Path:
    """Return the local folder of `model.path`; raises as `resolve_model`."""
    if not model.path:
        raise ConfigError(
            "model.path is empty; set it to the folder of a model in Hugging Face format, or to a hub id"
        )
    if is_url(model.path):
        with concerning("model.path"):
            folder = local_folder(model.path)
    elif not (folder := Path(model.path)).is_dir():
        folder = _download(model, "model.path", with_weights=with_weights)
        if with_weights and not any(folder.glob("*.safetensors")):
            raise ConfigError(
                f"model.path={model.path!r}: the hub has no safetensors weights of this model; convert it, "
                "or choose another"
            )
    if (with_weights or is_url(model.path)) and not (folder / "config.json").is_file():
        raise ConfigError(f"model.path={model.path!r} is not the folder of a model: it has no config.json")
    if with_weights:
        with concerning(f"model.path={model.path!r}"):
            check_weights(folder)
    return folder


def is_hub_id(path: str) -> bool:
    """Return whether a path has the form of a hub id, `owner/name` or `name`, and is not a local folder."""
    return _HUB_ID.fullmatch(path) is not None and not Path(path).is_dir()


def find_tokenizer(path: str, *, key: str = "model.tokenizer_path") -> Path:
    """Return the local folder of a tokenizer; raises as `resolve_model`."""
    if is_url(path):
        with concerning(key):
            return local_folder(path)
    return Path(path) if Path(path).is_dir() else _download(ModelConfig(path=path), key, with_weights=False)


def _download(model: ModelConfig, key: str, *, with_weights: bool) -> Path:
    """Download the files of a hub id; return the folder, which is named after the commit."""
    if Path(model.path).is_file():
        raise ConfigError(f"{key}={model.path!r} is a file; name the folder of a model, or a hub id")
    if not _HUB_ID.fullmatch(model.path):
        raise ConfigError(
            f"{key}={model.path!r} cannot be loaded: no such folder, and not a hub id either (owner/name)"
        )
    patterns = [
        *_DESCRIPTION,
        *(_WEIGHTS if with_weights else ()),
        *(_CODE if model.trust_remote_code else ()),
    ]
    try:
        return download("model", model.path, model.revision, patterns, ignore_patterns=list(_OTHER_COPIES))
    except HubError as error:
        raise ConfigError(f"{key}={model.path!r} cannot be loaded: {error}") from None
