"""Where a module of agentrl is now that a file still imports by its former name."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
RENAMED = {
    "agentrl.dialects": "agentrl.extras.gateway",
    "agentrl.fleet": "agentrl.cluster",
    "agentrl.images": "agentrl.data",
    "agentrl.serving.embedded": "agentrl.extras.embedded",
    "agentrl.serving": "agentrl.servers",
    "agentrl.sglang": "agentrl.servers",
    "agentrl.simulation": "agentrl.extras.plan",
    "agentrl.workers": "agentrl.cluster",
    "agentrl.interactions.gsm8k": "agentrl.extras.answers.gsm8k_partner",
    "agentrl.rewards.code": "agentrl.extras.sandbox.code_reward",
    "agentrl.rewards.terminal": "agentrl.extras.sandbox.terminal_reward",
    "agentrl.tools.gsm8k_reward": "agentrl.extras.answers.gsm8k_tool",
    "agentrl.tools.python": "agentrl.extras.sandbox.python_tool",
}
"""Former names, and those of packages, whose last part is another now."""
MOST = 3


def moved_note(error: BaseException) -> str:
    """Return `; it is ... now` for a module of agentrl that was not found but stands elsewhere; else ""."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or not name.startswith("agentrl."):
        return ""
    whole = next((former for former in RENAMED if f"{name}.".startswith(f"{former}.")), None)
    if whole is not None:
        return f"; it is {RENAMED[whole]}{name.removeprefix(whole)} now"
    found = [f"agentrl.extras.{name.removeprefix('agentrl.')}"]
    if not _exists(found[0]):
        found = sorted(map(_dotted, _named(name.rpartition(".")[2])))[:MOST]
    return f"; it is {' or '.join(found)} now" if found else ""


def _exists(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _named(stem: str) -> list[Path]:
    files = [*PACKAGE.rglob(f"{stem}.py"), *PACKAGE.rglob(f"{stem}/__init__.py")]
    return [file for file in files if not {"inside", "shim"} & set(file.parts)]


def _dotted(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
