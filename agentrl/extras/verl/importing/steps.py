"""verl's two-step evaluation, `main_generation` and `main_eval`, whose configs become command lines here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.extras.verl.importing.source import WrittenConfig

ROLLOUT = "actor_rollout_ref.rollout"
KWARGS = "custom_reward_function.reward_kwargs"
SCORE_OPTIONS = {
    # key of verl's evaluation.yaml -> the option, and the value for which it is not needed
    "data.response_key": ("--response-key", "responses"),
    "data.prompt_key": ("--prompt-key", "prompt"),
    "data.data_source_key": ("--data-source-key", "data_source"),
    "data.reward_model_key": ("--reward-model-key", "reward_model"),
}
GENERATE_OPTIONS = {
    # Key of verl's generation.yaml, or of the ppo_trainer config that its generation server reads -> the
    # option, or `key=` of an override.
    "model.path": "--model",
    "actor_rollout_ref.model.path": "--model",
    "data.n_samples": "--n",
    f"{ROLLOUT}.n": "--n",
    "rollout.temperature": "--temperature",
    f"{ROLLOUT}.temperature": "--temperature",
    "rollout.top_p": "--top-p",
    f"{ROLLOUT}.top_p": "--top-p",
    "rollout.top_k": "--top-k",
    f"{ROLLOUT}.top_k": "--top-k",
    "rollout.response_length": "--max-tokens",
    f"{ROLLOUT}.response_length": "--max-tokens",
    "rollout.prompt_length": "data.max_prompt_tokens=",
    f"{ROLLOUT}.prompt_length": "data.max_prompt_tokens=",
    "data.prompt_key": "data.prompt_key=",
    "model.external_lib": "model.external_lib=",
}


@dataclass(frozen=True, slots=True)
class CommandStep:
    """A command line, and the keys that were set but have no option."""

    command: str
    unused: tuple[str, ...]


def step_of(source: WrittenConfig) -> CommandStep | None:
    """Return the command for a config of generation or evaluation; None for a config of a training."""
    if source.has("data.output_path") and (source.has("data.path") or source.has("data.train_files")):
        return _generate(source, "data.path" if source.has("data.path") else "data.train_files")
    return _score(source) if source.has("data.path") else None


def _generate(source: WrittenConfig, rows: str) -> CommandStep:
    files = source.get(rows)
    words = [
        "agentrl",
        "generate",
        "--in",
        str(files[0] if isinstance(files, list) else files),
        "--out",
        str(source.get("data.output_path")),
    ]
    used = [key for key in GENERATE_OPTIONS if source.has(key)]
    for key in used:
        option, value = GENERATE_OPTIONS[key], str(source.get(key))
        words += [f"{option}{value}"] if option.endswith("=") else [option, value]
    return _step(words, {rows, "data.output_path", *used}, source.written)


def _score(source: WrittenConfig) -> CommandStep:
    path = str(source.get("data.path"))
    words = ["agentrl", "score", path, "--out", f"{path.removesuffix('.parquet')}_scored.parquet"]
    function = "custom_reward_function.path"
    for key, (option, default) in SCORE_OPTIONS.items():
        if source.has(key) and source.get(key) != default:
            words += [option, str(source.get(key))]
    if source.has(function):
        words += ["--function", f"{source.get(function)}:{source.get('custom_reward_function.name')}"]
    kwargs = source.below(KWARGS)
    if kwargs:
        words += ["--kwargs", json.dumps(kwargs)]
    used = {
        "data.path",
        function,
        "custom_reward_function.name",
        *SCORE_OPTIONS,
        *(f"{KWARGS}.{name}" for name in kwargs),
    }
    return _step(words, used, source.written)


def _step(words: list[str], used: set[str], written: Mapping[str, object]) -> CommandStep:
    return CommandStep(
        shlex.join(words),
        tuple(key for key, value in written.items() if key not in used and value is not None),
    )
