"""Check of a dataset's sources against the weights of a curriculum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentrl.errors import DataError


def check_source_weights(weights: Mapping[str, float], sources: Iterable[str]) -> None:
    """Check that the weights name exactly the sources of the tasks.

    Raises:
        DataError: a weight has no source, or a source has no weight; the message lists them.
    """
    present = sorted(set(sources))
    unknown = [name for name in weights if name not in present]
    if unknown:
        raise DataError(
            f"data.curriculum.source_weights names {', '.join(unknown)}, of which no training row that is kept is; "
            f"the data has {', '.join(present)}"
        )
    unweighed = [name for name in present if name not in weights]
    if unweighed:
        raise DataError(
            f"data.curriculum.source_weights has no weight for {', '.join(unweighed)}; give every source of data.train_files one, "
            "or leave its files out"
        )
