"""Format of sparse weight updates on disk: names of weights, and the keys in a file of changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

CHANGES_FILE = "changes.safetensors"
CHANGES_FORMAT = "changes"
"""The `load_format` of a folder of changes: an extension of SGLang's formats that the embedded server
supports.
"""

CHANGES_LOADER = "agentrl_changes.load_changes"
"""The loader that SGLang imports from `LOADER_FOLDER`, for `--custom-weight-loader`."""
LOADER_FOLDER = Path(__file__).parent / "inside"
SHAPES_KEY = "shapes"

NAME_FILE, NAME_KEY = "weights_name.json", "weights_name"
POSITIONS, VALUES = "|positions", "|values"


def changed_name(base: str, parts: Mapping[str, memoryview]) -> str:
    """Return the name of the weights that result when `parts` is applied to the weights called `base`.

    The name is a sha256 over `base` and over the keys, sizes and bytes of `parts`, the tensors of a file.
    """
    digest = hashlib.sha256(base.encode())
    for key in sorted(parts):
        digest.update(f"\n{key} {parts[key].nbytes}\n".encode())
        digest.update(parts[key])
    return digest.hexdigest()
