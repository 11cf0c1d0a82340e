"""Commands that a page shows: `agentrl ...` and `make ...`, with their options, variables and overrides."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parts.docs_names import Project

OVERRIDABLE = {"train", "sft", "rm", "replay", "plugins", "play", "eval", "generate", "show", "explain"}
"""Commands whose words KEY=VALUE are keys of a config."""


def command(line: str, project: Project) -> Iterator[str]:
    """Yield what is wrong with a line that runs `agentrl` or `make`; other lines are not ours."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words or Path(words[0]).name not in ("agentrl", "make"):
        return
    words = [word.strip("[]").replace("]...", "").rstrip(",") for word in words]
    yield from (_make if words[0] == "make" else _agentrl)(words[1:], project)


def _make(words: list[str], project: Project) -> Iterator[str]:
    targets, variables = project.targets
    for word in words:
        name, is_setting, _ = word.partition("=")
        if name not in (variables if is_setting else targets) and not name.startswith("-"):
            yield f"the Makefile has no {name}"


def _agentrl(words: list[str], project: Project) -> Iterator[str]:
    found = [project.command]
    while words and subcommands(found[0]) and not words[0].startswith("-"):
        names, words = words[0].split("|"), words[1:]
        known = subcommands(found[0])
        if missing := [name for name in names if name not in known and not name.isupper() and name != "..."]:
            yield f"agentrl has no command {', '.join(missing)}"
        found = [known[name] for name in names if name in known]
        if not found:
            return
    takes = options(project.command).union(*map(options, found))
    for before, word in itertools.pairwise(["", *words]):
        name, is_setting, _ = word.partition("=")
        if name.startswith("--"):
            if not set(name.split("|")) <= takes:
                yield f"{found[0].name} has no option {name}"
        elif (
            is_setting
            and not before.startswith("--")
            and found[0].name in OVERRIDABLE
            and not is_override(name, project)
        ):
            yield f"no config key {name}"


def is_override(name: str, project: Project) -> bool:
    """Tell whether a key may be overridden: a key, what lies below a mapping, a section, or a folder of
    configs/.
    """
    name = name.lstrip("+~")
    parents = {name.rsplit(".", count)[0] for count in range(name.count(".") + 1)}
    is_section = any(key.startswith(f"{name}.") for key in project.keys)
    return name.isupper() or bool(parents & project.keys) or is_section or project.has_file(f"configs/{name}")


def subcommands(one: Any) -> dict[str, Any]:
    return getattr(one, "commands", {})


def is_key(name: str, project: Project) -> bool:
    """Tell whether prose may mean a key of the config: as in an override, or the end of one."""
    return is_override(name, project) or any(key.endswith(f".{name}") for key in project.keys)


def options(one: Any) -> frozenset[str]:
    return frozenset(
        (
            "--help",
            *(
                option
                for p in one.params
                for option in (*p.opts, *p.secondary_opts)
                if option.startswith("--")
            ),
        )
    )


def all_commands(one: Any) -> Iterator[Any]:
    yield one
    for below in subcommands(one).values():
        yield from all_commands(below)
