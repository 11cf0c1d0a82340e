"""A small root file system from the files of this machine: an image for tests, made without a registry."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

COMMANDS = (
    *("bash", "sh", "cat", "ls", "mkdir", "mkfifo", "chmod", "ln", "sleep", "echo", "true", "seq", "rm"),
    *("test", "git", "touch", "id"),
)
PYTHON = Path("/usr/bin/python3")
"""The system's interpreter: it is small, and its library has one folder."""


def can_be_made() -> bool:
    return PYTHON.exists()


def make_root(folder: Path, files: dict[str, str]) -> Path:
    """Make a root file system in `folder` with some commands, the system's Python, and `files`."""
    for name in COMMANDS:
        if (found := shutil.which(name, path="/usr/bin:/bin")) is not None:
            add_program(folder, Path(found))
    interpreter = PYTHON.resolve()
    add_program(folder, interpreter)
    for name in ("python3", "python"):
        (folder / "usr/bin" / name).symlink_to(interpreter.name)
    library = Path("/usr/lib") / interpreter.name
    ignored = shutil.ignore_patterns(
        "__pycache__", "test", "idlelib", "ensurepip", "lib2to3", "config-*", "*.a"
    )
    shutil.copytree(library, folder / str(library)[1:], ignore=ignored, symlinks=True)
    for extension in (library / "lib-dynload").glob("*.so"):
        add_libraries(folder, extension)
    for name in ("bin", "lib", "lib64"):
        if not (folder / name).exists() and (folder / "usr" / name).exists():
            (folder / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "dev", "proc", "sys", "etc", "work"):
        (folder / name).mkdir(exist_ok=True)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def add_program(folder: Path, program: Path) -> None:
    target = folder / "usr/bin" / program.name
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, target)
    add_libraries(folder, program)


def add_libraries(folder: Path, binary: Path) -> None:
    listed = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=False).stdout
    for word in listed.split():
        if word.startswith("/") and Path(word).exists():
            usual = word if word.startswith("/usr/") else f"/usr{word}"
            target = folder / usual[1:]
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, target)
