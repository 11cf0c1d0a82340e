"""Environments of their own with packages of worlds, built once in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def interpreter_with(*requirements: str) -> str:
    """Return the Python of an environment with these requirements, which pin their versions."""
    recipe = hashlib.sha256("\n".join([*requirements, sys.version]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "agentrl" / "hubs" / recipe
    python = folder / "bin" / "python"
    if not (folder / ".done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *requirements], check=True, timeout=1800)
        (folder / ".done").touch()
    return str(python)
