"""The tree of versions: lags along it, rollbacks, and its stored form."""

from __future__ import annotations

import json

import numpy as np
import pytest

from agentrl.buffer.lineage import Lineage
from agentrl.types import NO_VERSION


def abandoned() -> Lineage:
    """The tree of the module's docstring: steps 3 and 4 are undone, the weights of 2 are published as 5."""
    lineage = Lineage()
    for version in range(5):
        lineage.publish(version, version)
    lineage.roll_back(2)
    lineage.publish(5, 2)
    lineage.publish(6, 3)
    return lineage


LAGS = {0: 3, 1: 2, 2: 1, 3: 2, 4: 3, 5: 1, 6: 0, NO_VERSION: 0, 9: 3, 8: 2}


def lags(lineage: Lineage) -> dict[int, int]:
    return {version: lineage.lag(version) for version in LAGS}


def test_the_lag_is_the_distance_in_the_tree():
    lineage = abandoned()
    assert lineage.version == 6
    assert lags(lineage) == LAGS
    lineage.publish(9, 4)
    assert [lineage.lag(version) for version in (9, 6, 5, 4, 7)] == [0, 3, 4, 6, 2]


def test_before_the_first_publish_nothing_lags():
    lineage = Lineage()
    assert lineage.version == NO_VERSION
    assert lineage.lag(NO_VERSION) == 0
    assert lineage.lag(3) == 3 - NO_VERSION
    lineage.roll_back(4)
    lineage.publish(2, 0)
    assert (lineage.version, lineage.lag(2), lineage.lag(0)) == (2, 0, 2)
    lineage.publish(3, 1)
    assert (lineage.lag(2), lineage.lag(3)) == (1, 0)


def test_after_a_rollback_lags_count_from_the_restored_weights():
    lineage = Lineage.of([(0, 0), (1, 1), (2, 2), (3, 3)])
    lineage.roll_back(1)
    assert [lineage.lag(version) for version in range(4)] == [1, 0, 1, 2]
    assert lineage.version == 3
    lineage.publish(4, 1)
    assert [lineage.lag(version) for version in range(5)] == [1, 0, 1, 2, 0]
    lineage.publish(5, 2)
    lineage.roll_back(2)
    assert [lineage.lag(version) for version in range(6)] == [2, 1, 2, 3, 1, 0], "2 is of the undone branch"
    lineage.roll_back(0)
    assert [lineage.lag(version) for version in range(6)] == [0, 1, 2, 3, 1, 2]


@pytest.mark.parametrize(("step", "version"), [(2, 1), (3, 1), (4, 4), (9, 4), (0, 0), (1, 1)])
def test_a_step_that_was_not_published_has_the_weights_before_it(step, version):
    lineage = Lineage.of([(0, 0), (1, 1), (4, 4)])
    lineage.roll_back(step)
    lineage.publish(7, step)
    assert lineage.lag(version) == 0


def test_before_all_published_steps_there_is_the_first_publish():
    lineage = Lineage.of([(3, 5), (4, 6)])
    lineage.roll_back(2)
    lineage.publish(5, 2)
    assert [lineage.lag(version) for version in (3, 4, 5)] == [0, 1, 0]


@pytest.mark.parametrize("version", [6, 5])
def test_versions_increase(version):
    lineage = abandoned()
    with pytest.raises(ValueError, match=f"version {version} was published after version 6"):
        lineage.publish(version, 9)
    assert lags(lineage) == LAGS


def test_pairs_of_versions_and_steps_are_a_lineage():
    """A step that is not larger is a rollback."""
    assert lags(Lineage.of([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 2), (6, 3)])) == LAGS
    assert Lineage.of([]).version == NO_VERSION
    twice = Lineage.of([(0, 0), (3, 0)])
    assert (twice.lag(0), twice.lag(3)) == (0, 0)
    assert Lineage.of([(0, 0), (3, 1)]).lag(0) == 3
    from_one = Lineage.of([(2, 1), (5, 1)])
    assert from_one.lag(2) == 0
    early = Lineage.of([(2, -1), (5, 0)])
    assert early.lag(2) == 3


def test_lags_of_tokens():
    found = abandoned().lags(np.array([6, 3, 3, NO_VERSION, 0, 9], dtype=np.int32))
    assert found.tolist() == [0, 2, 2, 0, 3, 3]
    assert found.dtype == np.int32
    assert abandoned().lags(np.array([[6, 0], [5, 6]], dtype=np.int32)).tolist() == [[0, 3], [1, 0]]


def test_an_undone_step_is_no_more():
    lineage = Lineage.of([(0, 0), (1, 1), (2, 2), (3, 3)])
    lineage.roll_back(1)
    lineage.roll_back(1)
    assert lineage.lag(1) == 0
    lineage.publish(4, 1)
    lineage.roll_back(3)
    assert (lineage.lag(1), lineage.lag(4), lineage.lag(3)) == (0, 0, 2)


def test_the_stored_form():
    """Version, depth and fork of each; a tree begins at 0."""
    assert Lineage.of([(0, 0), (2, 1), (5, 1)]).state() == {
        "current": 5,
        "restored": None,
        "depths": [[0, 0, 0], [2, 2, 2], [5, 2, 2]],
        "steps": [(0, 0), (1, 2)],
    }
    empty = Lineage()
    empty.roll_back(3)
    empty.publish(4, 3)
    assert empty.state() == {"current": 4, "restored": None, "depths": [[4, 0, 0]], "steps": [(3, 0)]}


def test_a_copy_and_a_stored_tree_go_on_alike():
    for other in (abandoned().copy(), Lineage.restored(json.loads(json.dumps(abandoned().state())))):
        assert lags(other) == LAGS
        assert other.version == 6
        other.roll_back(2)
        other.publish(7, 2)
        assert [other.lag(version) for version in (2, 5, 6, 7)] == [0, 0, 1, 0]
    original = abandoned()
    original.roll_back(2)
    copied = original.copy()
    assert copied.lag(6) == original.lag(6) == 1
    copied.publish(7, 2)
    copied.roll_back(0)
    assert (original.version, original.lag(6), original.lag(4)) == (6, 1, 2)
