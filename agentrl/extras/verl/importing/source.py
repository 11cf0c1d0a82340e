"""A config written for verl (a YAML file and Hydra overrides) as a flat table of its keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.config.yaml_files import read_nodes
from agentrl.errors import ConfigError

DEFAULTS: Mapping[str, Any] = {
    # Defaults of verl 0.5 to 0.9 that differ from ours, or that are read together with another key.
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "actor_rollout_ref.actor.use_dynamic_bsz": False,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": 0.0002,
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": 0.1,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.dtype": "bfloat16",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "async_training.staleness_threshold": 0.1,
    "async_training.require_batches": 1,
    "async_training.trigger_parameter_sync_step": 4,
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.device": "cuda",
    "trainer.use_v1": True,
    "trainer.resume_mode": "auto",
    "custom_reward_function.name": "compute_score",
}

NUMBERS = frozenset(
    key for key, value in DEFAULTS.items() if isinstance(value, (int, float)) and not isinstance(value, bool)
) | {
    "actor_rollout_ref.actor.ppo_micro_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.n_gpus_per_node",
    "critic.optim.lr_warmup_steps",
    "critic.optim.lr_warmup_steps_ratio",
    "critic.model.lora_rank",
    "actor_rollout_ref.model.lora.rank",
    "rollout.total_rollout_steps",
    "rollout.nnodes",
    "rollout.n_gpus_per_node",
    "trainer.total_training_steps",
}
"""Keys that are used in calculations."""
DIVISORS = {
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "async_training.require_batches",
    "async_training.trigger_parameter_sync_step",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
}

PLACEHOLDER = re.compile(r"<[A-Za-z][^<>]*>")
MAX_OVERRIDE, MAX_BRACKETS = 20_000, 500
"""Characters and opening brackets of an override that is read."""
MAX_FACTOR = 10**8
"""Bound on the length of a value with its interpolations, relative to what is written."""
_KEY = re.compile(r"\+*(?!trainer\.|ray_)\w+(\.\w+)+(?=[=:])")
_OF_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^{},]*(?:,([^{}]*))?\}")

OF_VERL = (
    *(
        "ppo_trainer",
        "ppo_megatron_trainer",
        "sft_trainer",
        "sft_trainer_engine",
        "generation",
        "evaluation",
        "_self_",
    ),
    *("dapo_trainer", "fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer"),
)
"""Configs, and entries of a `defaults` list, whose content is represented by DEFAULTS."""


@dataclass(frozen=True)
class WrittenConfig:
    """The keys that were set, by their dotted names, with interpolations resolved; null counts as set.

    Attributes:
        unread: parts that the file refers to but that were not read, in words.
        missing: files that were not found, programs and values without which the run is another one, in
            words.
        defaults: verl's values for keys that are not set.
        is_supervised: the config is for supervised training.
    """

    written: Mapping[str, Any]
    unread: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    is_supervised: bool = False

    def __post_init__(self) -> None:
        for key in NUMBERS & self.written.keys():
            value = self.written[key]
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ConfigError(f"{key}={value}: must be a number")
            if key in DIVISORS and value is not None and value < 1:
                raise ConfigError(f"{key}={value}: must be at least 1")

    def get(self, key: str) -> Any:
        """Return the value of a key: as set, else verl's default, else None."""
        value = self.written.get(key)
        return self.defaults.get(key) if value is None else value

    def has(self, key: str) -> bool:
        """Return whether a key was set to a value other than null."""
        return self.written.get(key) is not None

    def below(self, prefix: str) -> dict[str, Any]:
        """Return the values set below a key, by the rest of their dotted names."""
        return {
            key[len(prefix) + 1 :]: value
            for key, value in self.written.items()
            if key.startswith(f"{prefix}.")
        }


def read_source(file: str | None, overrides: Sequence[str]) -> WrittenConfig:
    """Read a YAML file of verl and command-line overrides in Hydra's grammar.

    Overrides have the forms `key=value`, `+key=value` and `~key`.

    Raises:
        ConfigError: the file is missing or not YAML, or an override cannot be read.
    """
    tree = read_file(file) if file is not None else {}
    unread = tuple(
        f"defaults: {entry}: give its settings as overrides"
        for entry in tree.pop("defaults", None) or []
        if entry not in OF_VERL
    )
    tree.pop("hydra", None)
    with_overrides(tree, overrides)
    return resolve(tree, unread)


def with_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Apply overrides to a tree, in order.

    Raises:
        ConfigError: an override cannot be read.
    """
    for text in overrides:
        _apply(tree, _parse(text))
    tree.pop("hydra", None)  # settings of Hydra itself


def resolve(
    tree: Mapping[str, Any],
    unread: tuple[str, ...],
    *,
    missing: tuple[str, ...] = (),
    supervised_by: Mapping[str, Any] | None = None,
) -> WrittenConfig:
    """Return a tree as a WrittenConfig, with its interpolations resolved.

    `supervised_by`: the defaults of a supervised training; None: the config is for another training.
    """
    defaults = DEFAULTS if supervised_by is None else supervised_by
    own, names = _without_environment(tree)
    notes = [
        f"{key}: it is a variable of the environment, which is not read; give it as {key}=..."
        for key in names
    ]
    needed = [note for note in notes if is_needed(note)]
    rest = [note for note in notes if not is_needed(note)]
    written = _resolve(own, defaults)
    is_supervised = supervised_by is not None
    return WrittenConfig(written, (*unread, *rest), (*missing, *needed), defaults, is_supervised)


def is_needed(note: str) -> bool:
    """Return whether a note about a value that was not read, which begins with its key, is of one that
    decides more than where a run is, how it is called, and how large its microbatches are.
    """
    key = _KEY.match(note)
    return key is not None and not key[0].endswith("_token_len_per_gpu")


def _without_environment(tree: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """Return a tree with the defaults of the environment's variables, and the keys without one, left out.

    The environment is not that of the run, and may hold secrets.
    """
    found: dict[str, Any] = {}
    names: list[str] = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            kept, inner = _without_environment(value, f"{prefix}{name}.")
            names += inner
            if kept or not value:
                found[name] = kept
            continue
        own = (
            _OF_ENVIRONMENT.sub(lambda m: m[0] if m[1] is None else m[1], value)
            if isinstance(value, str)
            else value
        )
        if "oc.env" in str(own):
            names.append(f"{prefix}{name}")
        else:
            found[name] = own
    return found, names


def read_file(file: str) -> dict[str, Any]:
    if not Path(file).is_file():
        raise ConfigError(f"config file {file!r} does not exist; overrides are written key=value")
    try:
        read_nodes(Path(file))
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: invalid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: a config of verl must be a mapping of sections")
    return {str(key): value for key, value in tree.items()}


def _parse(text: str) -> Override:
    if len(text) > MAX_OVERRIDE or sum(map(text.count, "[{(")) > MAX_BRACKETS:
        raise ConfigError(
            f"override {text[:60]!r}... is not read: it has more than {MAX_OVERRIDE:,} characters or "
            f"{MAX_BRACKETS} brackets"
        )
    try:
        [override] = OverridesParser.create().parse_overrides([text])
    except OverrideParseException as error:
        if (found := PLACEHOLDER.search(text)) is not None:
            why = f"has the placeholder {found[0]}; write a value in its place"
            raise ConfigError(f"override {text!r} {why}") from None
        raise ConfigError(f"override {text!r} cannot be read: {str(error).splitlines()[0][:200]}") from None
    except RecursionError:
        raise ConfigError(f"override {text[:60]!r}... is nested too deeply to be read") from None
    if override.is_sweep_override():
        raise ConfigError(
            f"override {text!r} has several values; write a list as key=[a,b], or quote text that contains a "
            "comma"
        )
    return override


def _apply(tree: dict[str, Any], override: Override) -> None:
    *sections, name = override.key_or_group.split(".")
    for section in sections:
        inner = tree.get(section)
        if not isinstance(inner, dict):
            inner = tree[section] = {}
        tree = inner
    if override.type is OverrideType.DEL:
        tree.pop(name, None)
    else:
        tree[name] = override.value()


def _resolve(tree: Mapping[str, Any], defaults_of_verl: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a tree.

    Interpolations can refer to verl's defaults; one that cannot be resolved stays as text.
    """
    factor = math.prod(max(1, str(value).count("${")) for _, value in _leaves(tree))
    if factor > MAX_FACTOR:
        raise ConfigError("the config is not read: its interpolations may repeat one another without end")
    defaults = OmegaConf.create({})
    for key, value in defaults_of_verl.items():
        OmegaConf.update(defaults, key, value)
    merged = OmegaConf.merge(defaults, OmegaConf.create(dict(tree)))
    return {key: _resolved(merged, key, value) for key, value in _leaves(tree)}


def _resolved(tree: Any, key: str, value: Any) -> Any:
    try:
        found = OmegaConf.select(tree, key)
    except OmegaConfBaseException:
        return value
    return OmegaConf.to_container(found, resolve=False) if OmegaConf.is_config(found) else found


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
