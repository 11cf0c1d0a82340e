"""Packages of worlds, installed once in the user's cache folder, each apart from our own environment."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

REASONING_GYM = Path(__file__).parents[1] / "extras/hubs/reasoning_gym.txt"


def interpreter_with(*requirements: str) -> str:
    """Return the Python of an environment with these requirements, which pin their versions."""
    recipe = hashlib.sha256("\n".join([*requirements, sys.version]).encode()).hexdigest()[:16]
    folder = _cache() / "hubs" / recipe
    python = folder / "bin" / "python"
    if not (folder / ".done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *requirements], check=True, timeout=1800)
        (folder / ".done").touch()
    return str(python)


def reasoning_gym_folder() -> str:
    """Return the folder with the real reasoning-gym, for PYTHONPATH: pip compiles a part of it."""
    recipe = hashlib.sha256(REASONING_GYM.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = _cache() / "reasoning-gym" / recipe
    if not (folder / ".done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        subprocess.run([*install, "--target", str(folder), "-r", str(REASONING_GYM)], check=True, timeout=900)
        (folder / ".done").touch()
    return str(folder)


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"
