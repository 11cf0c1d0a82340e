"""Check that servers know the weights to be published, by the model files that they are started from.

SGLang silently skips an unknown name, and its scheduler crashes on an unexpected shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from safetensors import SafetensorError, safe_open

from agentrl.errors import ConfigError
from agentrl.types import TensorSpec


def check_known(specs: Sequence[TensorSpec], folder: Path) -> None:
    """Compare the weights to be published with the model files. No check if the folder has no safetensors.

    Raises:
        ConfigError: a weight is not in the files, or has another shape there.
    """
    known = read_shapes(folder)
    if not known:
        return
    for spec in specs:
        # Files of a base model lack the prefix of the class with a head. Servers add it, as transformers
        # does.
        shape = known.get(spec.name) or known.get(spec.name.partition(".")[2])
        if shape is None:
            near = get_close_matches(spec.name, known, n=1, cutoff=0) or ["nothing"]
            problem = f"which its files do not have (nearest: {near[0]}): servers would skip it and keep the old weights"
        elif shape != spec.shape:
            problem = f"which has the shape {list(shape)} in its files: servers could not take it"
        else:
            continue
        raise ConfigError(
            f"{folder}: the learner would publish {spec.name} {list(spec.shape)}, {problem}; this model cannot be trained here"
        )


def read_shapes(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """Return {name: shape} of all weights in the safetensors of a folder, from the file headers.

    Raises:
        ConfigError: a file is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="numpy") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
    return shapes
