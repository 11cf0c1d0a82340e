"""Dataclasses of which many thousands are pickled."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def pickled_fast(cls: C) -> C:
    """Let a frozen dataclass with slots and at least two fields be pickled without looking up its fields for
    each object, as the standard library does.
    """
    names = [field.name for field in dataclasses.fields(cls)]
    values_of = operator.attrgetter(*names)
    setters = [getattr(cls, name).__set__ for name in names]
    assert len(names) > 1, "attrgetter of one name returns no tuple"

    def get_state(self: Any) -> Any:
        return values_of(self)

    def set_state(self: Any, state: Any) -> None:
        for set_value, value in zip(setters, state, strict=True):
            set_value(self, value)

    setattr(cls, "__getstate__", get_state)  # noqa: B010 - mypy knows them as methods
    setattr(cls, "__setstate__", set_state)  # noqa: B010
    return cls
