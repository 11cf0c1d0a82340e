"""Tasks of reasoning-gym: where one comes from, and how it is made again."""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from agentrl.errors import ConfigError, DataError, PluginError
from agentrl.extras.hubs.evaluated_answers import ANSWER_FORMS, is_evaluating
from agentrl.extras.hubs.packages import hub_package
from agentrl.types import JsonObject, Task

KEY = "reasoning_gym"
"""Key of a row's `extra_info`, name of the reward, and first part of the data source."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The origin of a task: item `index` of the generator's data set with this seed, size and config (JSON).

    An item is a function of all five and of the package's version.
    """

    generator: str
    seed: int
    size: int
    index: int
    config: str = "{}"

    @classmethod
    def of(cls, task: Task) -> Generated:
        """Read the origin of a row's task.

        Raises:
            DataError: the row has none, or a value in it has another type.
        """
        given = task.extra_info.get(KEY)
        try:
            found = cls(**given) if isinstance(given, Mapping) else None
        except TypeError:
            found = None
        if found is None or any(
            type(getattr(found, name)) is not kind
            for name, kind in (
                ("generator", str),
                ("seed", int),
                ("size", int),
                ("index", int),
                ("config", str),
            )
        ):
            raise DataError(
                f"task {task.task_id}: extra_info.{KEY} must have generator, seed, size, index and config "
                f"(JSON text), is {str(given)[:80]!r}; write rows with `agentrl data reasoning_gym`"
            )
        if not 0 <= found.index < found.size:
            raise DataError(
                f"task {task.task_id}: extra_info.{KEY}.index={found.index}: must be below size={found.size}"
            )
        return found

    def row(self) -> JsonObject:
        """Return it as the row stores it."""
        return asdict(self)

    def dataset(self) -> Any:
        """Return the package's data set; raises as `data_set`."""
        return data_set(self.generator, self.seed, self.size, self.config)

    def entry(self) -> dict[str, Any]:
        """Return the item: question, answer, metadata.

        Raises:
            ConfigError, PluginError: see `data_set`.
            DataError: the generator raised.
        """
        dataset = self.dataset()
        try:
            return dict(dataset[self.index])
        except Exception as error:
            raise DataError(
                f"generator {self.generator!r} raised for item {self.index} of seed {self.seed}: "
                f"{type(error).__name__}: {error}"
            ) from error


@lru_cache(maxsize=32)
def data_set(generator: str, seed: int, size: int, config: str) -> Any:
    """Return a data set of the package reasoning-gym. `config` is JSON.

    Raises:
        PluginError: the package is not installed, has no such generator, or its scorer evaluates answers in a
            way that nobody has read.
        ConfigError: the generator refuses the config.
    """
    factory = hub_package("reasoning_gym.factory", extra="reasoning-gym", needed_by="reasoning_gym")
    names = sorted(set(factory.DATASETS) - {"composite"})
    if generator not in names:
        close = difflib.get_close_matches(generator, names)
        raise PluginError(
            f"reasoning-gym has no generator {generator!r}; "
            + (f"did you mean {', '.join(close)}?" if close else f"it has {', '.join(names)}")
        )
    _require_read(generator, factory.DATASETS[generator][0])
    try:
        values = json.loads(config)
        if not isinstance(values, dict):
            raise TypeError("it is no JSON object")
        return factory.create_dataset(generator, **{**values, "seed": seed, "size": size})
    except Exception as error:
        raise ConfigError(
            f"generator {generator!r} refuses the config {config[:200]}: {type(error).__name__}: {error}"
        ) from error


def _require_read(generator: str, dataset_class: type) -> None:
    source = inspect.getsource(sys.modules[dataset_class.__module__])
    if generator not in ANSWER_FORMS and is_evaluating(source):
        raise PluginError(
            f"generator {generator!r}: this version of reasoning-gym evaluates text as Python in "
            f"{dataset_class.__module__}, and agentrl does not know whether it is the model's answer; use "
            "another generator, or reasoning-gym==0.1.25"
        )
