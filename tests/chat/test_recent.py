"""Values kept by the identity of the object they come from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat.recent import NUM_KEPT, Recent


@given(st.lists(st.integers(0, NUM_KEPT + 2), max_size=60))
def test_a_value_is_derived_again_only_if_enough_others_were_derived_since(visits):
    objects = [[0] for _ in range(NUM_KEPT + 3)]  # all equal: identity alone tells them apart
    derived: list[int] = []

    def derive(given: list[int]) -> int:
        derived.append(next(i for i, one in enumerate(objects) if one is given))
        return derived[-1]

    recent = Recent(derive)
    for visited in visits:
        is_kept = visited in derived[-NUM_KEPT:]
        before = len(derived)
        assert recent.get(objects[visited]) == visited
        assert len(derived) == before + (not is_kept)
