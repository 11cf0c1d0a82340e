"""`StoredFacts`: what `take` returns are the facts that were added, wherever they are decoded."""

import pickle
from pathlib import Path

import pytest

from agentrl.buffer.rows import StoredFacts
from agentrl.errors import CheckpointError
from parts.trajectories import make_trajectory, stored


def test_they_are_the_facts_that_were_stored_also_in_another_process(tmp_path: Path) -> None:
    attempts = stored(
        *(make_trajectory([-1, 0, 0], member=m, reward=m / 7) for m in range(3)), folder=tmp_path
    )
    found = StoredFacts([attempt.to_json() for attempt in attempts], tmp_path)
    for again in (found, pickle.loads(pickle.dumps(found))):
        assert list(again) == attempts
        assert again[1:] == attempts[1:]
        assert again[-1] == attempts[-1]
        assert len(again) == 3


def test_they_travel_as_they_are_stored(tmp_path: Path) -> None:
    [attempt] = stored(make_trajectory([-1, 0, 0]), folder=tmp_path)
    data = [attempt.to_json()] * 50
    found = StoredFacts(data, tmp_path)
    message = pickle.dumps(found, protocol=5)
    assert found[0] == attempt
    assert pickle.dumps(found, protocol=5) == message, "what is decoded stays here"


def test_something_else_is_told_at_the_first_look(tmp_path: Path) -> None:
    found = StoredFacts([b"{}"], tmp_path)
    with pytest.raises(CheckpointError, match="the facts of an attempt cannot be read"):
        found[0]
