"""The keys that a launch of verl sets: those of its config file, and of its overrides.

The config file is located as Hydra does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.extras.verl.importing.script import Launch
from agentrl.extras.verl.importing.source import (
    OF_VERL,
    WrittenConfig,
    is_needed,
    read_file,
    read_source,
    resolve,
    with_overrides,
)
from agentrl.extras.verl.importing.supervised_defaults import supervised_defaults

MAIN = "verl.trainer.main_ppo"
"""The module that `agentrl config import` assumes, unless a script names another."""
OWN_TRAINERS = (
    *("trainer.main_ppo", "trainer.main_ppo_sync", "transfer_queue.main_ppo", "main_ppo"),
    *("dapo.main_dapo", "dapo.src.main_dapo", "dapo_transfer_queue.main_dapo", "main_dapo"),
    *("fully_async_policy.fully_async_main", "fully_async_main"),
    *("one_step_off_policy.main_ppo", "one_step_off_policy.async_main_ppo"),
    *("trainer.fsdp_sft_trainer", "trainer.sft_trainer", "trainer.sft_trainer_ray"),
    *("fsdp_sft_trainer", "sft_trainer", "sft_trainer_ray"),
)
"""The ends of the main modules of verl whose keys are known here. Those of generation and evaluation are
recognised by their prefixes.
"""


def source_of(launch: Launch) -> WrittenConfig:
    """Return the keys that a launch sets. If its own config file is not found, it is listed in `missing`.

    Raises:
        ConfigError: a file or an override cannot be read.
    """
    tree: dict[str, Any] = {}
    missing = [note for note in launch.notes if is_needed(note)]
    unread = [note for note in launch.notes if not is_needed(note)]
    name = (launch.config_name or "").removesuffix(".yaml")
    if name and name not in OF_VERL:
        file = find_config(name, launch)
        if file is None:
            where = f" in {launch.config_path}" if launch.config_path else ""
            missing.append(
                f"{name}.yaml{where} was not found, so its keys are missing; run this command in the "
                "checkout, or give --config-path"
            )
        else:
            # verl's own config folder in each possible checkout
            searched = [root / Path(*MAIN.split(".")[:-1]) / "config" for root in _roots(launch)]
            tree, more = read_with_defaults(file, searched)
            unread += more
    if launch.module and not _is_known(launch.module):
        missing.append(
            f"{launch.module} is a separate program; what it does in addition to verl's trainer is unknown"
        )
    with_overrides(tree, [*launch.ranks, *launch.overrides] if launch.is_supervised else launch.overrides)
    is_supervised = launch.is_supervised or _is_supervised(tree)
    defaults = supervised_defaults(tree, launch.module) if is_supervised else None
    return resolve(tree, tuple(dict.fromkeys(unread)), missing=tuple(missing), supervised_by=defaults)


def _is_known(module: str) -> bool:
    main = module.rpartition(".")[2]
    is_trainer = any(module == own or ("." in own and module.endswith(f".{own}")) for own in OWN_TRAINERS)
    return is_trainer or main.startswith(("main_generation", "main_eval"))


def source_of_file(file: str | None, overrides: Sequence[str]) -> WrittenConfig:
    """Return the keys that a YAML file and overrides set."""
    source = read_source(file, overrides)
    if not _is_supervised(source.written):
        return source
    defaults = supervised_defaults(source.written, "")
    return replace(source, defaults=defaults, is_supervised=True)


def _is_supervised(written: Mapping[str, Any]) -> bool:
    """Return whether keys, flat or nested, belong to verl's supervised training.

    The sign is a model and an optimizer without a rollout, or a key of supervised training alone.
    """
    model = written.get("model")
    if "model.partial_pretrain" in written or (isinstance(model, Mapping) and "partial_pretrain" in model):
        return True
    sections = {key.partition(".")[0] for key in written}
    if "actor_rollout_ref" in sections:
        return False
    data = written.get("data")
    has_length = "data.max_length" in written or (isinstance(data, Mapping) and "max_length" in data)
    return has_length or {"model", "optim"} <= sections


def find_config(name: str, launch: Launch) -> Path | None:
    """Return the file of `--config-name`; None if it is not found.

    A relative `--config-path` is relative to the module's folder, as in Hydra. The checkout is searched for
    in the working directory, and from the script's folder upwards.
    """
    return next((file for folder in _folders(launch) if (file := folder / f"{name}.yaml").is_file()), None)


def _folders(launch: Launch) -> Iterator[Path]:
    given = Path(launch.config_path or "config").expanduser()
    if given.is_absolute():
        yield given
        return
    module = Path(*launch.module.split(".")[:-1]) if launch.module else Path()
    for root in _roots(launch):
        yield root / module / given
        yield root / Path(*MAIN.split(".")[:-1]) / given
        yield root / given


def _roots(launch: Launch) -> Iterator[Path]:
    yield launch.folder
    yield Path()
    if launch.file is not None:
        yield from launch.file.resolve().parents


def read_with_defaults(
    file: Path, searched: Sequence[Path], depth: int = 0
) -> tuple[dict[str, Any], list[str]]:
    """Read a config merged with the files of its `defaults` list.

    Returns it with notes about entries that were not found. Entries of verl itself are skipped, because their
    content is known.
    """
    own = read_file(str(file))
    own.pop("hydra", None)
    entries = own.pop("defaults", None) or []
    tree: dict[str, Any] = {}
    unread: list[str] = []
    is_merged = False
    for entry in entries if isinstance(entries, list) else []:
        if entry == "_self_":
            merge(tree, own)
            is_merged = True
        elif entry in OF_VERL:
            continue
        elif isinstance(entry, str) and depth < 5 and (found := _sibling(entry, file, searched)) is not None:
            inner, more = read_with_defaults(found, searched, depth + 1)
            merge(tree, inner)
            unread += more
        else:
            unread.append(f"defaults: {entry}: give its settings as overrides")
    if not is_merged:
        merge(tree, own)
    return tree, unread


def _sibling(entry: str, file: Path, searched: Sequence[Path]) -> Path | None:
    name = f"{entry.removesuffix('.yaml').lstrip('/')}.yaml"
    return next((path for folder in (file.parent, *searched) if (path := folder / name).is_file()), None)


def merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Merge `other` into `tree`, section by section; `other` takes precedence."""
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = dict(value) if isinstance(value, Mapping) else value
