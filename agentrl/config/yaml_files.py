"""YAML files as nodes with line numbers; aliases that expand to more than memory can hold are refused."""

from __future__ import annotations

from pathlib import Path

import yaml

MAX_EXPANDED = 1_000_000
"""Maximum number of characters and nodes of a config after
expansion of its aliases. Real configs have some thousands.
"""
MAX_DEPTH = 50
"""Levels of nesting; more overflow the stack of other readers of the same file, such as OmegaConf's."""
_TOO_DEEP = f"it is nested too deeply, at most {MAX_DEPTH} levels"


def read_nodes(path: Path, *, names_file: bool = False) -> yaml.Node | None:
    """Parse the YAML file at `path`; None if it is empty. `names_file`: errors and nodes carry the path.

    Raises:
        yaml.YAMLError: the file is not YAML, an anchor contains itself, its aliases expand to more than
            `MAX_EXPANDED`, or it has more than `MAX_DEPTH` levels.
        OSError, UnicodeDecodeError: the file cannot be read, or is not text.
    """
    text = path.read_text(encoding="utf-8")
    try:
        loader = yaml.SafeLoader(text)
        loader.name = str(path) if names_file else loader.name
        root: yaml.Node | None = loader.get_single_node()
        if root is not None:
            _measure(root, {}, 0)
    except RecursionError:
        raise yaml.YAMLError(_TOO_DEEP) from None
    return root


def _measure(node: yaml.Node, sizes: dict[int, int | None], depth: int) -> int:
    """Return the expanded size of a node.

    `sizes`: of all nodes so far, None for a node that is being measured.
    """
    if depth > MAX_DEPTH:
        raise yaml.YAMLError(_TOO_DEEP)
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise yaml.MarkedYAMLError(
                problem="an anchor contains an alias of itself", problem_mark=node.start_mark
            )
        return size
    sizes[id(node)] = None
    if isinstance(node, yaml.MappingNode):
        size = 1 + sum(_measure(part, sizes, depth + 1) for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        size = 1 + sum(_measure(part, sizes, depth + 1) for part in node.value)
    else:
        size = 1 + len(node.value)
    if size > MAX_EXPANDED:
        problem = f"its aliases expand to more than {MAX_EXPANDED:,} characters; a config has some thousands"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    sizes[id(node)] = size
    return size
