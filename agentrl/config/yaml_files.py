"""YAML files as nodes that know their lines, refused where aliases make little text stand for more than memory holds."""

from __future__ import annotations

from pathlib import Path

import yaml

MAX_EXPANDED = 1_000_000
"""Characters and nodes that a config may stand for once its aliases are written out; those of the project have some thousands."""


def read_nodes(path: Path, *, names_file: bool = False) -> yaml.Node | None:
    """Parse the YAML file at `path`; None: it is empty. `names_file`: marks of errors and nodes hold the path.

    Raises:
        yaml.YAMLError: it is no YAML, an anchor holds itself, or its aliases stand for more than `MAX_EXPANDED`.
        OSError, UnicodeDecodeError: it cannot be read, or is no text.
    """
    text = path.read_text(encoding="utf-8")
    try:
        loader = yaml.SafeLoader(text)
        loader.name = str(path) if names_file else loader.name
        root: yaml.Node | None = loader.get_single_node()
        if root is not None:
            _measure(root, {})
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    return root


def _measure(node: yaml.Node, sizes: dict[int, int | None]) -> int:
    """Return how much a node stands for; `sizes`: of the nodes seen so far, None for one that is being measured."""
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise yaml.MarkedYAMLError(problem="an anchor holds an alias of itself", problem_mark=node.start_mark)
        return size
    sizes[id(node)] = None
    if isinstance(node, yaml.MappingNode):
        size = 1 + sum(_measure(part, sizes) for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        size = 1 + sum(_measure(part, sizes) for part in node.value)
    else:
        size = 1 + len(node.value)
    if size > MAX_EXPANDED:
        problem = f"its aliases stand for more than {MAX_EXPANDED:,} characters; a config has some thousands"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    sizes[id(node)] = size
    return size
