"""Where a module of agentrl is now that somebody still imports by its former name."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent
RENAMED = {
    "agentrl.dialects": "agentrl.extras.gateway",
    "agentrl.fleet": "agentrl.cluster",
    "agentrl.images": "agentrl.data",
    "agentrl.config.supervised": "agentrl.extras.supervised.config",
    "agentrl.offline.supervised": "agentrl.extras.supervised.train",
    "agentrl.offline.supervised_data": "agentrl.extras.supervised.data",
    "agentrl.offline.supervised_loop": "agentrl.extras.supervised.loop",
    "agentrl.tracking.job_console": "agentrl.extras.supervised.console",
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


class FormerNames:
    """The finder that Python asks last: a former name is answered with the new one."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith("agentrl.") and (now := moved_to(name)):
            raise ModuleNotFoundError(f"No module named {name!r}; it is {now} now", name=name)


def moved_to(name: str) -> str:
    """Return where a module of agentrl is now that does not exist under its name; "" if nobody knows."""
    whole = next((former for former in RENAMED if f"{name}.".startswith(f"{former}.")), None)
    if whole is not None:
        return RENAMED[whole] + name.removeprefix(whole)
    found = [f"agentrl.extras.{name.removeprefix('agentrl.')}"]
    if not _exists(found[0]):
        found = sorted(map(_dotted, _named(name.rpartition(".")[2])))[:MOST]
    return " or ".join(found)


def _exists(module: str) -> bool:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _named(stem: str) -> list[Path]:
    files = [*PACKAGE.rglob(f"{stem}.py"), *PACKAGE.rglob(f"{stem}/__init__.py")]
    return [file for file in files if not {"inside", "shim"} & set(file.parts)]


def _dotted(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
