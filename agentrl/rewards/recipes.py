"""How to make a reward again in another process: by name, never by pickling the object."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from agentrl.errors import PluginError
from agentrl.plugins import AnyReward
from agentrl.plugins.sources import import_source


@dataclass(frozen=True, slots=True)
class Recipe:
    """`attribute` of `source` (a module, or the path of a file), called with `arguments`, which can be pickled."""

    source: str
    attribute: str
    arguments: tuple[Any, ...]

    def make(self) -> AnyReward:
        """Make the reward.

        Raises:
            UserError: the source is gone, or the reward refuses its config.
        """
        made: Any = import_source(self.source)
        for part in self.attribute.split("."):
            made = getattr(made, part)
        reward = made(*self.arguments)
        assert isinstance(reward, AnyReward), self
        return reward


def recipe_of_class(cls: type[AnyReward], *arguments: Any) -> Recipe:
    """Return the recipe of `cls(*arguments)`.

    Raises:
        PluginError: the class stands within a function, where no other process finds it.
    """
    if "<locals>" in cls.__qualname__:
        raise PluginError(
            f"reward {cls.name!r}: its class stands in a function; put it at the top of a file, so that other processes find it"
        )
    module = cls.__module__
    if module.startswith("agentrl_user_") or module == "__main__":  # a file of the user's: no name to import it by
        module = str(sys.modules[module].__file__)
    return Recipe(module, cls.__qualname__, arguments)
