"""Pack wheels for the checks on a GPU: for a machine with torch and transformers, and without a network.

    python benchmarks/gpu/pack.py                          # into .gpu_wheels/
    python benchmarks/gpu/pack.py --there there.txt        # leave out what the machine has: its `pip freeze`

Versions are those of the environment that runs this. README.md beside this file says what comes next.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = (
    *("transformers", "tokenizers", "safetensors", "peft", "pydantic", "hydra-core", "docstring-parser"),
    *("trio", "h11", "httpx2", "orjson", "jsonschema-rs", "jinja2", "uvicorn", "starlette", "psutil", "rich"),
    *("pyarrow", "pytest", "pytest-timeout", "hypothesis", "setuptools"),
)
"""What the suite and the package import, and what builds the package."""

NOT_NEEDED = frozenset({"hf-xet"})
"""What a package asks for, but only to download."""

WITH_TORCH = frozenset(
    ("torch", "numpy", "triton", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock")
) | {"typing-extensions", "pyyaml", "regex", "tqdm", "packaging"}
"""What a machine with torch and transformers has, in a version that serves. Not transformers itself and its
tokenizers: their versions matter.
"""

PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5, 31, 34, 35)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
)

Versions = Mapping[str, str | None]
"""Packages of the other machine; None: of an unknown version, which is taken to serve."""


def with_limits(names: Iterable[str]) -> list[str]:
    """Return the names with the versions that this package's own metadata ask for."""
    own = [Requirement(text) for text in metadata.requires("agentrl") or ()]
    limits = {canonicalize_name(r.name): str(r.specifier) for r in own}
    return [name + limits.get(canonicalize_name(name), "") for name in names]


def read_there(path: Path | None) -> dict[str, str | None]:
    """Return the packages of the other machine, from lines `name` or `name==version`."""
    found: dict[str, str | None] = dict.fromkeys(WITH_TORCH | NOT_NEEDED)
    for line in path.read_text(encoding="utf-8").splitlines() if path is not None else ():
        text = line.split("#")[0].split("@")[0].strip()
        if text:
            name, _, version = text.partition("==")
            found[canonicalize_name(name)] = version.strip() or None
    return found


def missing(roots: Iterable[str], there: Versions, *, python: str) -> dict[str, str]:
    """Return {name: version} of the packages to carry: the roots and all that they need.

    What is there is left out, unless its version is known and does not serve.
    """
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.0"}
    found: dict[str, str] = {}
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        own = there.get(name, "")
        if name in found or own is None or (own and requirement.specifier.contains(own, prereleases=True)):
            continue
        found[name] = metadata.version(name)
        for text in metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({**environment, "extra": ""}):
                waiting.append(needed)
    return found


def fetch(name: str, version: str, folder: Path, *, python: str) -> None:
    """Download the wheel for the other machine; build it here if there is only a source of plain Python.

    Raises:
        SystemExit: there is no wheel for that Python and platform.
    """
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    platforms = [f"--platform={platform}" for platform in PLATFORMS]
    target = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    wanted = f"{name}=={version}"
    done = subprocess.run([*pip, "download", *quiet, *target, "--dest", str(folder), wanted], check=False)
    if done.returncode:
        built = folder / "built"
        done = subprocess.run([*pip, "wheel", *quiet, "--wheel-dir", str(built), wanted], check=False)
        wheels = list(built.glob("*-none-any.whl"))
        if done.returncode or not wheels:
            raise SystemExit(f"{wanted} has no wheel for Python {python} on x86-64 Linux")
        wheels[0].rename(folder / wheels[0].name)
        shutil.rmtree(built)


def pack(folder: Path, packages: Mapping[str, str], *, python: str, limit_mib: float) -> list[str]:
    """Fill folders below `folder` with the wheels, each with at most `limit_mib`; return a line for each.

    Raises:
        SystemExit: a wheel is not to be had, or alone too large.
    """
    shutil.rmtree(folder, ignore_errors=True)
    fetched = folder / "fetched"
    fetched.mkdir(parents=True)
    for name, version in sorted(packages.items()):
        fetch(name, version, fetched, python=python)
    sizes = {file.name: file.stat().st_size / 2**20 for file in fetched.glob("*.whl")}
    lines = []
    for number, names in enumerate(split(sizes, limit_mib=limit_mib), start=1):
        part = folder / f"part{number}"
        part.mkdir()
        for name in names:
            (fetched / name).rename(part / name)
        lines += [f"{sizes[name]:7.2f} MiB  {part.name}/{name}" for name in names]
        lines.append(f"{sum(sizes[name] for name in names):7.2f} MiB  {part.name} in all")
    fetched.rmdir()
    return lines


def split(sizes: Mapping[str, float], *, limit_mib: float) -> list[list[str]]:
    """Divide wheels (name: MiB) into parts of at most `limit_mib`, the largest first.

    Raises:
        SystemExit: one is larger.
    """
    parts: list[list[str]] = []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if sizes[name] > limit_mib:
            raise SystemExit(f"{name} has {sizes[name]:.1f} MiB, more than --limit-mib={limit_mib:g}")
        fits = [part for part in parts if sum(sizes[own] for own in part) + sizes[name] <= limit_mib]
        if fits:
            fits[0].append(name)
        else:
            parts.append([name])
    return parts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(".gpu_wheels"))
    parser.add_argument("--there", type=Path, help="packages of the machine: names, or its `pip freeze`")
    parser.add_argument("--python", default="3.12", help="version of Python there")
    parser.add_argument(
        "--limit-mib", type=float, default=54, help="of the wheels of a call; the checkout has about 8"
    )
    options = parser.parse_args(arguments)
    packages = missing(with_limits(ROOTS), read_there(options.there), python=options.python)
    print("\n".join(pack(options.out, packages, python=options.python, limit_mib=options.limit_mib)))


if __name__ == "__main__":
    main()
