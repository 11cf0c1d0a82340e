"""The data sources of a dataset, against the weights that a curriculum gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentrl.errors import DataError


def check_source_weights(weights: Mapping[str, float], sources: Iterable[str]) -> None:
    """Refuse weights that name a source which no task has, or that leave one out.

    Raises:
        DataError: so it is; all sources of the data are named.
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
