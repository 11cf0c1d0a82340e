"""Recipes to create a reward in another process: by name, never by pickling the object."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from agentrl.errors import PluginError
from agentrl.plugins import AnyReward
from agentrl.plugins.sources import import_source


@dataclass(frozen=True, slots=True)
class Recipe:
    """`attribute` of `source` (a module or the path of a file), called with picklable `arguments`."""

    source: str
    attribute: str
    arguments: tuple[Any, ...]

    def make(self) -> AnyReward:
        """Create the reward.

        Raises:
            UserError: the source does not exist any more, or the reward rejects its config.
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
        PluginError: the class is defined inside a function, so another process cannot import it.
    """
    if "<locals>" in cls.__qualname__:
        raise PluginError(
            f"reward {cls.name!r}: its class is defined in a function; define it at the top level "
            "of a file, where other processes can import it"
        )
    module = cls.__module__
    # A user's file cannot be imported by name.
    if module.startswith("agentrl_user_") or module == "__main__":
        module = str(sys.modules[module].__file__)
    return Recipe(module, cls.__qualname__, arguments)
