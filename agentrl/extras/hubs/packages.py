"""Import of the packages of worlds, which are all optional."""

from __future__ import annotations

import importlib
from types import ModuleType

from agentrl.errors import PluginError


def hub_package(module: str, *, extra: str, needed_by: str) -> ModuleType:
    """Return an imported module of an optional package.

    Raises:
        PluginError: it is not installed, or something that it needs is not.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise PluginError(
            f"{needed_by} needs the package {error.name!r}, which is not installed: pip install "
            f"'agentrl[{extra}]'"
        ) from error
