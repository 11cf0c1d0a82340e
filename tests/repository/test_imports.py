"""Who may import whom (docs/architecture.md), read from every source file and seen in a fresh process."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from parts.rooms import PLUGINS, ROWS

ROOT = Path(__file__).parents[2]

ALLOWED_TO_PLUGINS = {"types", "errors", "plugins", "http", "rewards"}

WITH_TORCH = {
    *("algorithms", "learner", "controller"),
    *(
        "extras.embedded",
        "extras.export",
        "extras.supervised",
        "extras.doctor",
        "extras.research",
        "extras.datatools",
    ),
}
TORCH_FILES = {
    "agentrl/extras/plan/matrix_speed.py",
    "agentrl/servers/expert_routers.py",
    "agentrl/servers/inside/agentrl_changes.py",
    "agentrl/servers/process_group.py",
    "agentrl/servers/weight_names.py",
}
ON_THE_LEARNER = {"weights"}
"""Parts that call the learner, and so load torch with it."""
STILL_TO_THE_EXTRAS = 69
"""Imports of extras in the core, which may only become fewer."""
ELSEWHERE = "agentrl/extras/hubs/inside/"
"""Programs that run in the interpreters of other packages."""
WITH_RAY = {
    *("cluster", "controller", "cli"),
    *("extras.supervised", "extras.doctor", "extras.research", "extras.watch"),
}
IMPORTERS = {"import_module", "importlib.import_module", "__import__"}
HEAVY = {"torch", "transformers", "ray"}


def sources() -> dict[str, Path]:
    """Return every module of the package by its dotted name; the plugin folders stand at the root."""
    found = {}
    for folder, name in [("agentrl", "agentrl"), *((p, f"agentrl.{p}") for p in sorted(PLUGINS))]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [*name.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()


def file_of(module: str) -> str:
    return str(SOURCES[module].relative_to(ROOT))


@cache
def imports(module: str) -> tuple[tuple[str, str], ...]:
    """Return (file:line, dotted name) of every import of a module: also inside functions, and by
    `import_module` of a literal.
    """
    return tuple((f"{file_of(module)}:{line}", name) for line, name in _imports(module, SOURCES[module]))


def _imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in IMPORTERS
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def part_of(module: str) -> str:
    """Return the part a module belongs to: `agentrl.rollout.session` -> `rollout`, that of an extra ->
    `extras.boxes`; the package itself is ''.
    """
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] == "extras" else 1]) if parts else ""


def is_extra(part: str) -> bool:
    return part.split(".")[0] == "extras"


def row_of(part: str) -> int:
    return next(i for i, row in enumerate(ROWS) if part in row)


def may_import(importer: str, imported: str) -> bool:
    if importer == imported or imported == "" or is_extra(importer):
        return True
    if is_extra(imported):
        return False
    if importer in PLUGINS:
        return imported in ALLOWED_TO_PLUGINS
    return imported not in PLUGINS and row_of(imported) < row_of(importer)


def test_every_module_belongs_to_a_row() -> None:
    known = {"", *PLUGINS, *set().union(*ROWS)}
    rowless = [m for m in SOURCES if part_of(m) not in known and not is_extra(part_of(m))]
    assert rowless == [], "give its part a row in docs/architecture.md and in parts/rooms.py"


def test_imports_point_to_lower_rows() -> None:
    assert [
        f"{place} imports {name}"
        for module in SOURCES
        if (part := part_of(module)) != ""  # the package's own face: its names are looked up on use
        for place, name in imports(module)
        if name.split(".")[0] == "agentrl" and not may_import(part, part_of(name))
        if not is_extra(part_of(name))
    ] == []


def test_the_core_imports_no_more_of_the_extras_than_it_did() -> None:
    found = [
        f"{place} imports {name}"
        for module in SOURCES
        if not is_extra(part := part_of(module)) and part != ""
        for place, name in imports(module)
        if name.split(".")[0] == "agentrl" and is_extra(part_of(name))
    ]
    assert len(found) <= STILL_TO_THE_EXTRAS, found


def test_heavy_packages_are_imported_only_where_they_belong() -> None:
    assert [
        f"{place} imports {name}"
        for module in SOURCES
        for place, name in imports(module)
        if name.split(".")[0] in HEAVY - allowed_heavy(module)
    ] == []


def allowed_heavy(module: str) -> set[str]:
    is_torch_allowed = part_of(module) in WITH_TORCH or file_of(module) in TORCH_FILES
    is_ray_allowed = part_of(module) in WITH_RAY
    return ({"torch", "transformers"} if is_torch_allowed else set()) | ({"ray"} if is_ray_allowed else set())


def test_the_carriers_need_only_numpy() -> None:
    allowed = {*sys.stdlib_module_names, "agentrl", "numpy"}
    assert [
        f"{place} imports {name}"
        for module in SOURCES
        if part_of(module) in ROWS[0]
        for place, name in imports(module)
        if name.split(".")[0] not in allowed
    ] == []


def run_fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT / "tests",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_importing_the_package_is_cheap() -> None:
    seconds, loaded = run_fresh(
        "import sys, time; start = time.process_time(); import agentrl; spent = time.process_time() - start;"
        f"print(spent, sorted({HEAVY!r} & set(sys.modules)))"
    ).split(" ", 1)
    assert float(seconds) < 1.0
    assert loaded == "[]"


def test_light_parts_load_nothing_heavy() -> None:
    light = [
        module
        for module, path in SOURCES.items()
        if part_of(module) not in {*WITH_TORCH, *ON_THE_LEARNER, *WITH_RAY}
        and not is_extra(part_of(module))
        and path.name != "actor.py"
        and str(path.relative_to(ROOT)) not in TORCH_FILES
        and not str(path.relative_to(ROOT)).startswith(ELSEWHERE)
    ]
    code = f"""
import importlib, sys
for module in {light!r}:
    importlib.import_module(module)
    heavy = {HEAVY!r} & set(sys.modules)
    if heavy:
        print(module, "loads", sorted(heavy))
        break
"""
    assert run_fresh(code) == ""


def test_the_controller_loads_no_model_code() -> None:
    """It names what ranks do without doing it: transformers, peft and DTensor take seconds of the start of
    every run.
    """
    sharding = {f"torch.distributed.{name}" for name in ("checkpoint", "fsdp", "tensor")}
    of_ranks = {"transformers", "peft", "scipy.special", "sympy", *sharding}
    assert (
        run_fresh(f"import sys, agentrl.controller.train; print(sorted({of_ranks!r} & set(sys.modules)))")
        == "[]"
    )


PICTURES = {
    "agentrl.extras.view.run_picture",
    "agentrl.extras.view.run_panels",
    "agentrl.extras.view.evaluation_picture",
    "agentrl.extras.view.corrections_picture",
    "agentrl.extras.plan.picture",
}
"""Modules that load matplotlib, for a second."""


def test_pictures_are_loaded_only_when_they_are_drawn() -> None:
    for module, path in SOURCES.items():
        at_the_top = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        names = {name for node in at_the_top for name in imported_names(node)}
        loads = {name for name in names if name.split(".")[0] == "matplotlib" or name in PICTURES}
        assert not loads or module in PICTURES, (
            f"{module} loads {sorted(loads)}: import it in the function that draws"
        )


def imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    for alias in node.names:
        yield alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
    if isinstance(node, ast.ImportFrom):
        yield str(node.module)


def test_every_package_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {module for module, path in SOURCES.items() if path.name == "__init__.py"}
    assert packages <= set(listed), f"add to tool.setuptools.packages: {sorted(packages - set(listed))}"
