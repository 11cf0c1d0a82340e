"""`agentrl config explain`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from agentrl.cli.options import ConfigFile, Debug, ForCommand, Overrides, schema_for
from agentrl.errors import UserError, concerning

if TYPE_CHECKING:
    from agentrl.config.model import ModelConfig
    from agentrl.config.schema import Config


def config_explain(
    config: ConfigFile, overrides: Overrides = None, command: ForCommand = "train", debug: Debug = False
) -> None:
    """Print what a config amounts to: batch arithmetic, bound on lag, which weights enter the loss, memory of
    each role, warnings.

    The exit code is 2 if a GPU is too small for what it must hold (cluster.gpu_memory_gb), or if a model in a
    local folder cannot be trained.
    """
    from agentrl.config.compose import load_section
    from agentrl.config.schema import Config
    from agentrl.extras.plan.explain import explain
    from agentrl.extras.plan.explain_memory import refuse_too_large
    from agentrl.extras.plan.explain_supervised import explain_supervised
    from agentrl.extras.supervised.config import RMConfig, SFTConfig

    loaded = load_section(schema_for(command), config, overrides or [])
    if isinstance(loaded, Config):
        typer.echo(explain(loaded, flops_per_s=_measured_speed(loaded)))
        refuse_too_large(loaded)
        _check_local(loaded.learner_models)
    elif isinstance(loaded, SFTConfig | RMConfig):
        typer.echo(explain_supervised(loaded))
        if loaded.from_scratch.architecture == "none":
            _check_local({"actor": loaded.model})
    else:
        raise UserError(f"--for={command}: there is no explanation of its configs")


def _check_local(models: Mapping[str, ModelConfig]) -> None:
    """Check the architectures of models in local folders, by role; what is warned about is not repeated."""
    from agentrl.config.model_kind import find_obstacles

    folders = {role: Path(model.path).expanduser() for role, model in models.items() if model.path}
    for role, folder in folders.items():
        if (folder / "config.json").is_file() and not find_obstacles(str(folder)):
            from agentrl.learner.layout import check_architecture

            with concerning(role):
                check_architecture(models[role].model_copy(update={"path": str(folder)}))


def _measured_speed(config: Config) -> float | None:
    """Measure one thread with the policy's matrices; None if the policy does not run on CPUs."""
    from agentrl.extras.plan.explain_cpu import cpu_model

    if (size := cpu_model(config)) is None:
        return None
    from agentrl.extras.plan.matrix_speed import measure_flops_per_s

    return measure_flops_per_s(size.hidden_size, size.intermediate_size, dtype=config.model.dtype)
