"""The Python environment with a real SGLang for a CPU: built once, kept in the user's cache folder, one per
recipe.

`python tests/sglang_cpu/environment.py` builds it where it is missing and prints the path of its Python.
Python 3.11 or newer, Linux on x86-64 with glibc 2.34 or newer, 1.5 GB.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

RECIPE = Path(__file__).with_name("requirements.txt")
STAND_INS = Path(__file__).with_name("stand_ins.py")

CHECK = "import sys, sgl_kernel, sglang, torch; sys.exit(torch.cuda.is_available())"


class BuildError(Exception):
    """One line: what failed, and where the whole output is."""


def environments():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "sglang-cpu"


def environment_folder():
    """Return the folder of this recipe's environment, which need not exist."""
    recipe = b"\0".join([RECIPE.read_bytes(), STAND_INS.read_bytes(), platform.python_version().encode()])
    return environments() / hashlib.sha256(recipe).hexdigest()[:16]


def python_of(folder):
    return folder / "bin" / "python"


def is_built(folder):
    return (folder / ".done").exists()


def built_python():
    """Return the environment's Python.

    Raises:
        BuildError: nobody has built it.
    """
    folder = environment_folder()
    if not is_built(folder):
        raise BuildError(
            f"no SGLang environment in {folder}: run `make test-sglang`, or `python "
            "tests/sglang_cpu/environment.py` alone"
        )
    return python_of(folder)


def build(folder):
    """Make the environment from nothing. What an interrupted build left is removed first, and `.done` is
    written last.

    Raises:
        BuildError: a step failed.
    """
    if folder.exists():
        shutil.rmtree(folder)
    log = folder.with_suffix(".log")
    log.write_text("")
    run([sys.executable, "-m", "venv", folder], "make an environment", log)
    # SGLang's own requirements would bring torch for CUDA and some twenty packages of kernels: the list here
    # is complete without them.
    run([python_of(folder), "-m", "pip", "install", "--no-deps", "-r", RECIPE], "install its packages", log)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    shutil.copy(STAND_INS, packages / "sglang_stand_ins.py")
    (packages / "sglang_stand_ins.pth").write_text("import sglang_stand_ins\n")
    run([python_of(folder), "-c", CHECK], "import SGLang and a torch for CPUs", log)
    (folder / ".done").touch()


def run(command, purpose, log):
    with log.open("a") as output:
        if subprocess.run(
            list(map(str, command)), stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).returncode:
            last = (log.read_text().strip() or "no output").splitlines()[-1]
            raise BuildError(f"the SGLang environment could not {purpose}: {last} (all of it: {log})")


def main():
    folder = environment_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second one waits for the first, and finds it built
        if not is_built(folder):
            print(
                f"building an environment with SGLang for CPUs in {folder} (1.5 GB, some minutes)",
                file=sys.stderr,
            )
            try:
                build(folder)
            except BuildError as error:
                print(error, file=sys.stderr)
                return 1
    print(python_of(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
