"""Asynchronous reinforcement learning for multi-turn, tool-using language-model agents.

    import agentrl
    result = agentrl.train(agentrl.load_config("config.yaml", ["trainer.steps=20"]))

Importing this package is cheap: neither torch nor Ray is loaded before `train` is called.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.moved import FormerNames

if TYPE_CHECKING:
    from agentrl.config.schema import Config
    from agentrl.controller.run import RunResult

__version__ = "0.1.0"

sys.meta_path.append(FormerNames)


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file with Hydra overrides (`trainer.steps=20`) into a checked config.

    Raises ConfigError.
    """
    from agentrl.config.compose import load_config

    return load_config(path, overrides)


def train(config: Config) -> RunResult:
    """Run or resume a training, as `agentrl train` does. See `agentrl.controller.train`."""
    from agentrl.data.input_files import check_prepared

    check_prepared(config)  # reports missing files before torch is loaded, which takes seconds
    from agentrl.heap import without_collections

    with without_collections():
        from agentrl.controller.train import train

    return train(config)
