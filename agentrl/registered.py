"""What installed packages register as entry points: one name of a group belongs to one package."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

from agentrl.errors import AgentRLError, ConfigError, PluginError


@dataclass(frozen=True)
class Registered:
    """A name, and what stands behind it. others: entry points of other packages with the same name."""

    entry: EntryPoint
    others: tuple[EntryPoint, ...] = ()

    @property
    def owner(self) -> str:
        return owner(self.entry)

    def load(self) -> Any:
        """Import it. Raises whatever its code raises, and:

        Raises:
            PluginError: several packages register the name.
            ConfigError: it needs a package that an extra of pip brings.
        """
        if self.others:
            both = " and ".join(f"{owner(entry)} ({entry.value})" for entry in (self.entry, *self.others))
            raise PluginError(f"{self.entry.name!r} is registered by {both}: uninstall one of them")
        try:
            return self.entry.load()
        except ModuleNotFoundError as error:
            if self.entry.dist is None or (cure := cure_of(error, self.entry.dist)) is None:
                raise
            raise ConfigError(f"{self.entry.name!r} {cure}") from error


PACKAGES = {"stemmer": "pystemmer", "pil": "pillow"}
"""Packages whose modules have other names than they."""
_REQUIRED = re.compile(r"([A-Za-z0-9._-]+).*extra == [\"']([a-z0-9-]+)[\"']")


def cure_of(error: ModuleNotFoundError, package: Distribution) -> str | None:
    """Return which of the package's extras brings the missing module; None if none does."""
    module = (error.name or "").partition(".")[0].lower().replace("_", "-")
    wanted = PACKAGES.get(module, module)
    for requirement in package.requires or ():
        found = _REQUIRED.match(requirement)
        if found is not None and found[1].lower() == wanted and found[2] not in ("all", "dev"):
            return f"needs {found[1]}: pip install '{package.name}[{found[2]}]'"
    return None


def registered(group: str) -> Mapping[str, Registered]:
    """Return what is registered in a group, by name, in the order in which packages list it."""
    found: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry in _installed(tuple(sys.path)).select(group=group):
        if all(entry.value != known.value for known in found[entry.name]):
            found[entry.name].append(entry)
    return {name: Registered(first, tuple(others)) for name, (first, *others) in found.items()}


@cache
def _installed(path: tuple[str, ...]) -> Any:
    # Reading the metadata of all installed packages takes some 30 ms.
    return entry_points()


def named(kind: str, name: str, *, group: str) -> Any:
    """Return what a package registers as `name`, or say in one line why there is none.

    Args:
        kind: what the group's names stand for, for messages: `policy loss`.

    Raises:
        PluginError: no package registers the name (the message lists the known ones), several do, or its
            import fails.
        ConfigError: it needs a package that an extra of pip brings.
    """
    installed = registered(group)
    if name not in installed:
        raise PluginError(
            f"unknown {kind} {name!r}; known: {', '.join(sorted(installed))}; "
            f"your own: file.py:NAME, or an entry point of {group}"
        )
    try:
        return installed[name].load()
    except AgentRLError:
        raise
    except Exception as error:  # importing runs third-party code
        place = installed[name].entry.value
        raise PluginError(f"{kind} {name!r} ({place}) cannot be imported: {error}") from error


def names_of_ours(group: str) -> tuple[str, ...]:
    """Return the names that this package registers in a group."""
    ours = (one.entry for one in registered(group).values())
    return tuple(sorted(entry.name for entry in ours if entry.dist and entry.dist.name == "agentrl"))


def owner(entry: EntryPoint) -> str:
    """Return the package that registers it."""
    return "an unknown package" if entry.dist is None else f"package {entry.dist.name!r}"


def required(group: str, name: str, *, by: str) -> Any:
    """Return what `name` of a group stands for. by: the setting that needs it, with its value.

    Raises:
        ConfigError: no installed package registers it.
        PluginError: several do.
    """
    one = registered(group).get(name)
    if one is None:
        raise ConfigError(f"{by} needs {name!r} of {group}, which no installed package registers")
    return one.load()


def all_of(group: str) -> tuple[Any, ...]:
    """Return what the names of a group stand for, in their order."""
    return tuple(one.load() for one in registered(group).values())
