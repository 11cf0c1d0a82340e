"""What was finished is never lost and never played again: the store of attempts."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.evaluation.store import AttemptStore
from agentrl.types import Message, Outcome, Trajectory
from parts.trajectories import make_trajectory

FILE = "attempts.sqlite"


def attempt(member: int = 0, outcome: Outcome = Outcome.COMPLETED, length: int = 3) -> Trajectory:
    messages = (Message("user", "?"), Message("assistant", "é" * member))
    turns = [-1] + [0] * (length - 1)
    return make_trajectory(turns, member=member, task_id="set:0", messages=messages, outcome=outcome)


def kept(folder: Path, keys: list[str]) -> list[int | None]:
    with AttemptStore(folder / FILE) as store:
        return [None if one is None else one.member for one in store.read(keys)]


def test_what_was_added_is_there_after_any_number_of_openings(tmp_path: Path) -> None:
    for start in (0, 3, 6):
        with AttemptStore(tmp_path / FILE) as store:
            store.add([(f"k{start + index}", attempt(start + index)) for index in range(3)])
    keys = [f"k{index}" for index in range(9)]
    assert kept(tmp_path, keys) == list(range(9))
    assert kept(tmp_path, ["k4", "absent", "k0"]) == [4, None, 0], "in the order that is asked for"


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1])
def test_a_killed_process_leaves_all_that_it_had_added(tmp_path: Path, delay_s: float) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; "
        "from agentrl.evaluation.store import AttemptStore; from parts.trajectories import make_trajectory; "
        "store = AttemptStore(Path(sys.argv[1])); [(store.add([(f'k{i}', make_trajectory([0], member=i))]), "
        "print(i, flush=True)) for i in range(100000)]"
    )
    command = [sys.executable, "-c", script, str(tmp_path / FILE), str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        time.sleep(delay_s)
        process.kill()
        last = int(["0", *process.stdout.read().split()][-1])
    members = kept(tmp_path, [f"k{index}" for index in range(last + 2)])
    assert members[: last + 1] == list(range(last + 1))
    assert members[-1] in (None, last + 1), "one more may be on disk than was said"


def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("these are notes of somebody, not attempts")
    with pytest.raises(ConfigError, match="cannot be read as attempts"):
        AttemptStore(tmp_path / FILE)
    assert (tmp_path / FILE).read_text().startswith("these are notes")


def test_a_failure_gives_way_and_a_success_does_not(tmp_path: Path) -> None:
    with AttemptStore(tmp_path / FILE) as store:
        store.add([("k", attempt(1, Outcome.MODEL_ERROR))])
        assert not store.has("k"), "it is played again"
        store.add([("k", attempt(2))])
        assert store.has("k")
        store.add([("k", attempt(3, Outcome.TIMEOUT))])
        assert store.has("k")
    assert kept(tmp_path, ["k"]) == [2]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_outcomes_with_a_score_are_finished(tmp_path: Path, outcome: Outcome) -> None:
    with AttemptStore(tmp_path / FILE) as store:
        store.add([("k", attempt(0, outcome))])
    with AttemptStore(tmp_path / FILE) as store:
        assert store.has("k") == (outcome in {Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.TURN_LIMIT})
        [read] = store.read(["k"])
        assert read is not None
        assert read.outcome is outcome


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with AttemptStore(tmp_path / FILE), pytest.raises(ConfigError, match="another process writes"):
        AttemptStore(tmp_path / FILE)
    with AttemptStore(tmp_path / FILE) as store:
        assert not store.has("k")
