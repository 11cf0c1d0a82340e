"""`pickled_fast`: what comes back equals what was pickled."""

import copy
import pickle
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.fast_pickle import pickled_fast


@pickled_fast
@dataclass(frozen=True, slots=True)
class Point:
    x: int
    name: str
    more: dict[str, float] = field(default_factory=dict)
    inner: "Point | None" = None


points = st.recursive(
    st.builds(Point, st.integers(), st.text(), st.dictionaries(st.text(), st.floats(allow_nan=False))),
    lambda inner: st.builds(Point, st.integers(), st.text(), st.just({}), inner),
    max_leaves=4,
)


@given(points, st.sampled_from(range(2, pickle.HIGHEST_PROTOCOL + 1)))
def test_what_comes_back_is_equal(point: Point, protocol: int) -> None:
    assert pickle.loads(pickle.dumps(point, protocol)) == point
    assert copy.deepcopy(point) == point


def test_what_was_pickled_with_other_fields_is_not_read() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Point(1, "a").__setstate__((1, "a", {}))  # type: ignore[attr-defined]


def test_one_field_is_refused() -> None:
    with pytest.raises(AssertionError, match="no tuple"):

        @pickled_fast
        @dataclass(frozen=True, slots=True)
        class One:
            x: int
