"""Loading of what verl's YAML files name: imports classes, and adapts to variants of their methods."""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from agentrl.config.yaml_files import read_nodes
from agentrl.errors import PluginError
from agentrl.extras.verl import shim as verl_shim
from agentrl.plugins.sources import locate


def read_entries(path: str, key: str, *, option: str) -> list[dict[str, Any]]:
    """Return the list under `key` of a YAML file, with interpolations resolved.

    Each entry has a `class_name`.

    Raises:
        PluginError: the file does not exist, is not valid YAML, or has another structure.
    """
    file = locate(path)
    if not file.is_file():
        raise PluginError(f"agent.{option}={path!r}: the file does not exist")
    try:
        read_nodes(file)
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        raise PluginError(f"agent.{option}={path!r}: {' '.join(str(error).split())}") from error
    entries = content.get(key) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise PluginError(f"agent.{option}={path!r}: the key {key!r} with a list is missing")
    for index, entry in enumerate(entries):
        if not (isinstance(entry, dict) and isinstance(entry.get("class_name"), str)):
            raise PluginError(f"agent.{option}={path!r}: {key}[{index}] has no class_name")
    return entries


def create(class_name: str, *, where: str, **arguments: Any) -> Any:
    """Import a class by its dotted name and create one instance.

    As in verl, modules are also found in the working directory.

    Raises:
        PluginError: it does not exist, or its module or constructor raised.
    """
    install()
    module_name, _, attribute = class_name.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name), attribute)
        return cls(**arguments)
    except Exception as error:  # boundary: any error of the user's code is a broken plugin
        raise PluginError(f"{where}: class_name {class_name!r}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Explain in one line why code for verl failed, with the remedy if it needs the real verl."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    missing = (error.name or "") if isinstance(error, ImportError) else ""
    if missing.partition(".")[0] != "verl":
        return text
    return f"{text}; it needs more of verl: install verl, or start in the root of a checkout of verl"


def install() -> None:
    """Make `verl`, and the modules of the working directory, importable."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    verl_shim.install()


def module(name: str, *, where: str) -> Any:
    """Import a module of verl; raise PluginError if the installed verl lacks it, or it fails to import."""
    install()
    try:
        return importlib.import_module(name)
    except Exception as error:  # boundary: verl's many imports may raise anything
        raise PluginError(
            f"{where}: {name} of the installed verl fails to import: {type(error).__name__}: {error}"
        ) from error


def overrides(instance: object, method: str, *, base: str) -> bool:
    """Return whether the instance overrides a method of verl's base class, given as `module:Class`."""
    module, _, name = base.partition(":")
    inherited = getattr(getattr(importlib.import_module(module), name), method)
    return getattr(type(instance), method, inherited) is not inherited


def with_id(method: Callable[..., Any], instance_id: str) -> tuple[str, ...]:
    """Return the positional arguments for a method that may or may not take the attempt's id."""
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    takes = any(
        kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds
    )
    return (instance_id,) if takes or inspect.Parameter.VAR_POSITIONAL in kinds else ()


def number(value: object) -> float | None:
    """Return a finite number as float, None for all else."""
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    return None


def metrics(values: object) -> dict[str, float]:
    """Return the entries that are finite numbers: only they can be reported."""
    items = values.items() if isinstance(values, Mapping) else ()
    return {str(name): found for name, value in items if (found := number(value)) is not None}
