"""What the classes of verl's YAML of tools need to be loaded, found without running any of their code."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import PluginError
from agentrl.extras.verl.loading import read_entries
from agentrl.extras.verl.shim import FOLDER


def find_unloadable(path: str) -> list[str]:
    """Return why a run in this folder could not load classes of a YAML; [] if the file is not here."""
    try:
        entries = read_entries(path, "tools", option="verl_tool_config")
    except PluginError:
        return []  # it may be on another machine; a run reports a broken file at its start
    is_installed = _is_installed("verl")
    found: list[str] = []
    for entry in entries:
        name = str(entry["class_name"])
        if (entry.get("config") or {}).get("type", "native") != "native":
            found.append(f"{name}: name its servers in agent.mcp_servers")
        elif not (is_installed and name.startswith("verl.")):
            missing = sorted(set(_missing(name.rpartition(".")[0], set(), is_installed=is_installed)))
            found += [f"{name} needs {', '.join(missing)}, which is not here"] if missing else []
    return found


def _missing(module: str, seen: set[str], *, is_installed: bool) -> Iterator[str]:
    """Yield the modules that are missing to import `module`, itself included."""
    if module in seen:
        return
    seen.add(module)
    top = module.partition(".")[0]
    file = _file_of(module)
    if file is None:
        is_there = is_installed if top == "verl" else _is_installed(top)
        yield from () if is_there else (module,)
        return
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for name in _imports(file, package):
        yield from _missing(name, seen, is_installed=is_installed)


def _file_of(module: str) -> Path | None:
    """Return the file of a module of the working directory or of the stand-ins for verl; None: elsewhere."""
    top, _, rest = module.partition(".")
    roots = [FOLDER / Path(*rest.split("."))] if top == "verl" and rest else []
    roots.append(Path(*module.split(".")))
    files = (file for root in roots for file in (root.with_name(f"{root.name}.py"), root / "__init__.py"))
    return next((file for file in files if file.is_file()), None)


def _imports(file: Path, package: str) -> Iterator[str]:
    """Yield the modules that a file imports at its top. Imports within `try` are left out."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return  # the import itself reports it
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            source = _file_of(module)
            text = "" if source is None else source.read_text(encoding="utf-8", errors="replace")
            inner = [f"{module}.{alias.name}" for alias in node.names if alias.name not in text]
            yield from [module] if source is None else inner


def _is_installed(top: str) -> bool:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    return spec is not None and (spec.origin is not None or top != "verl")
