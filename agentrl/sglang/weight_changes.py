"""The form in which changed weights travel by disk: how learner and servers name weights, and what stands in a file of changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

CHANGES_FILE = "changes.safetensors"
CHANGES_FORMAT = "changes"
"""The `load_format` of an update from a folder of changes, which the embedded server knows beside SGLang's."""

NAME_FILE, NAME_KEY = "weights_name.json", "weights_name"
POSITIONS, VALUES = "|positions", "|values"


def changed_name(base: str, parts: Mapping[str, memoryview]) -> str:
    """Return the name of the weights that `parts`, the bytes of a file's tensors, make of those called `base`: a sha256 over both."""
    digest = hashlib.sha256(base.encode())
    for key in sorted(parts):
        digest.update(f"\n{key} {parts[key].nbytes}\n".encode())
        digest.update(parts[key])
    return digest.hexdigest()
