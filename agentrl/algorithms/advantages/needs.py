"""Check for the batch columns that some estimators need beyond rewards."""

from __future__ import annotations

from torch import Tensor


def needed(value: Tensor | None, estimator: str, what: str) -> Tensor:
    """Return the value, or raise if the batch lacks it.

    Raises:
        ValueError: `value` is None.
    """
    if value is None:
        raise ValueError(f"{estimator} needs {what}, and the batch has none")
    return value
