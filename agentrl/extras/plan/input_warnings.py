"""Warnings about what a config needs from outside: its model and its data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.config.storage_urls import is_url


def input_warnings(model: str | None, train_files: Sequence[str], *, is_prepared: bool) -> Iterator[str]:
    """Yield a sentence for each input that is not named, or that does not exist here.

    Args:
        model: `model.path`; None: the run needs none.
        is_prepared: other commands make the inputs first (`trainer.prepared_by`); only names are required.
    """
    if model == "":
        yield "model.path is empty: set it to the folder of a model in Hugging Face format, or to a hub id"
    elif model is not None and not is_prepared and _is_lost(model):
        yield f"model.path={model} does not exist here"
    if not train_files:
        yield "data.train_files is empty: there is nothing to train on"
    for file in () if is_prepared else train_files:
        if not is_url(file) and not Path(file).exists():
            yield f"data.train_files: {file} does not exist here"


def _is_lost(path: str) -> bool:
    """Return whether a path can only be local, and does not exist. `owner/name` may be a hub id."""
    first = Path(path).parts[0]
    is_relative = path.startswith(("./", "../"))
    is_local = is_relative or path.count("/") > 1 or Path(path).is_absolute() or Path(first).is_dir()
    return is_local and not is_url(path) and not Path(path).is_dir()
