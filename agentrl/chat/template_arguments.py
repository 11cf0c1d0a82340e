"""The arguments of a chat template besides messages and tools, such as `enable_thinking`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes

from agentrl.errors import ConfigError
from agentrl.types import JsonObject

GIVEN = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables that each render sets. No argument may replace them."""


def json_copy(arguments: Mapping[str, Any]) -> JsonObject:
    """Return a copy of the arguments. It is what JSON would hold, because rows and servers store JSON.

    Raises:
        ConfigError: a value is no JSON value: NaN, a date, a mapping whose keys are not text.
    """
    for name, value in arguments.items():
        try:
            copied = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            copied = None
        if copied != value or type(copied) is not type(value):
            raise ConfigError(
                f"{name}={str(value)[:80]!s} is no JSON value ({type(value).__name__}); values are text, "
                "numbers, true, false, null, lists and mappings"
            )
    result: JsonObject = json.loads(json.dumps(dict(arguments), allow_nan=False))
    return result


def check_names(names: Iterable[str], sources: Iterable[nodes.Template], known: Iterable[str]) -> None:
    """Check that each name is a variable that the template reads.

    Args:
        sources: the syntax trees of the template.
        known: variables that the tokenizer's folder sets: special tokens.

    Raises:
        ConfigError: no template reads the variable, or it is not an argument.
    """
    trees = list(sources)
    read = set().union(*map(meta.find_undeclared_variables, trees))
    for name in names:
        if name in GIVEN or name in known:
            raise ConfigError(f"{name!r} is set by agentrl in each render, and is no argument")
        if name in read:
            continue
        shown = sorted(_meant(trees, read) - GIVEN - set(known))
        close = difflib.get_close_matches(name, shown, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"the chat template reads no variable {name!r}; {hint}it reads: {', '.join(shown) or 'none'}"
        )


def _meant(trees: Iterable[nodes.Template], read: set[str]) -> set[str]:
    """Return the variables of `read` that the template never sets, or sets only if they are not given.

    Jinja also reports variables that are set in a branch and read later.
    """
    stored: set[str] = set()
    tested: set[str] = set()
    for tree in trees:
        stored |= {name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")}
        tests = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
        tested |= {node.name for node in tests if isinstance(node, nodes.Name)}
    return {name for name in read if name not in stored or name in tested}


def parse_all(environment: jinja2.Environment, sources: Iterable[str]) -> list[nodes.Template]:
    """Return the syntax trees of templates that are known to compile."""
    return [environment.parse(source) for source in sources]
