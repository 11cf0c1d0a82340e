"""verl's two-step evaluation, `main_generation` and `main_eval`, whose configs are command lines here."""

from __future__ import annotations

import shlex

from agentrl.config.importing.source import Source

SCORE_OPTIONS = {
    # Of verl's evaluation.yaml -> the option, and the value that needs none.
    "data.response_key": ("--response-key", "responses"),
    "data.prompt_key": ("--prompt-key", "prompt"),
    "data.data_source_key": ("--data-source-key", "data_source"),
    "data.reward_model_key": ("--reward-model-key", "reward_model"),
}


def command_of(source: Source) -> str | None:
    """Return the command that stands for verl's evaluation.yaml; None for a config of a training."""
    if not source.has("data.path") or source.has("data.output_path"):
        return None
    path = str(source.get("data.path"))
    words = ["agentrl", "score", path, "--out", f"{path.removesuffix('.parquet')}_scored.parquet"]
    for key, (option, default) in SCORE_OPTIONS.items():
        if source.has(key) and source.get(key) != default:
            words += [option, str(source.get(key))]
    if source.has("custom_reward_function.path"):
        words += ["--function", f"{source.get('custom_reward_function.path')}:{source.get('custom_reward_function.name')}"]
    return shlex.join(words)
