"""What was finished is never lost and never played again: the store of attempts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.evaluation.store import AttemptStore
from agentrl.types import Message, Outcome, Trajectory


def attempt(member: int = 0, outcome: Outcome = Outcome.COMPLETED, length: int = 3) -> Trajectory:
    return Trajectory(
        group_id=0,
        member=member,
        task_id="set:0",
        data_source="arithmetic",
        agent_name="single_turn_agent",
        token_ids=np.arange(length, dtype=np.int32),
        action_mask=np.arange(length) > 0,
        behavior_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        turn_ids=np.zeros(length, np.int16),
        messages=(Message("user", "?"), Message("assistant", "é" * member)),
        rewards=(),
        outcome=outcome,
    )


def kept(folder: Path, keys: list[str]) -> list[int | None]:
    with AttemptStore(folder) as store:
        return [None if one is None else one.member for one in store.read(keys)]


def part_of(folder: Path) -> Path:
    [part] = folder.glob("*.attempts")
    return part


def test_what_was_added_is_there_after_any_number_of_openings(tmp_path: Path) -> None:
    for start in (0, 3, 6):
        with AttemptStore(tmp_path) as store:
            store.add([(f"k{start + index}", attempt(start + index)) for index in range(3)])
    keys = [f"k{index}" for index in range(9)]
    assert kept(tmp_path, keys) == list(range(9))
    assert kept(tmp_path, ["k4", "absent", "k0"]) == [4, None, 0], "in the order that is asked for"


@settings(max_examples=40)
@given(data=st.data())
def test_a_write_cut_anywhere_costs_only_what_was_unfinished(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("store")
    sizes = []
    with AttemptStore(folder) as store:
        for member in range(4):
            store.add([(f"k{member}", attempt(member, length=1 + 5 * member))])
            sizes.append(part_of(folder).stat().st_size)
    cut = data.draw(st.integers(0, sizes[-1]))
    os.truncate(part_of(folder), cut)
    whole = sum(size <= cut for size in sizes)
    assert kept(folder, [f"k{member}" for member in range(4)]) == [*range(whole), *[None] * (4 - whole)]
    with AttemptStore(folder) as store:
        assert store.num_cut == (cut not in (0, *sizes))
        store.add([(f"k{member}", attempt(member)) for member in range(whole, 4)])
    assert kept(folder, [f"k{member}" for member in range(4)]) == [0, 1, 2, 3], "what follows goes into another part"


def test_a_damaged_attempt_is_not_read(tmp_path: Path) -> None:
    with AttemptStore(tmp_path) as store:
        store.add([("a", attempt(1))])
        first = part_of(tmp_path).stat().st_size
        store.add([("b", attempt(2))])
    data = bytearray(part_of(tmp_path).read_bytes())
    data[first + 200] ^= 1
    part_of(tmp_path).write_bytes(data)
    assert kept(tmp_path, ["a", "b"]) == [1, None]


def test_a_failure_gives_way_and_a_success_does_not(tmp_path: Path) -> None:
    with AttemptStore(tmp_path) as store:
        store.add([("k", attempt(1, Outcome.MODEL_ERROR))])
        assert not store.has("k"), "it is played again"
        store.add([("k", attempt(2))])
        assert store.has("k")
        store.add([("k", attempt(3, Outcome.TIMEOUT))])
        assert store.has("k")
    assert kept(tmp_path, ["k"]) == [2]


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_outcomes_with_a_score_are_finished(tmp_path: Path, outcome: Outcome) -> None:
    with AttemptStore(tmp_path) as store:
        store.add([("k", attempt(0, outcome))])
    with AttemptStore(tmp_path) as store:
        assert store.has("k") == (outcome in {Outcome.COMPLETED, Outcome.TRUNCATED, Outcome.TURN_LIMIT})
        [read] = store.read(["k"])
        assert read is not None
        assert read.outcome is outcome


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with AttemptStore(tmp_path), pytest.raises(ConfigError, match="another process writes"):
        AttemptStore(tmp_path)
    with AttemptStore(tmp_path) as store:
        assert not store.has("k")


def test_a_killed_process_leaves_what_it_had_added_and_no_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; from test_eval_store import attempt;"
        "from agentrl.evaluation.store import AttemptStore; store = AttemptStore(Path(sys.argv[1]));"
        "store.add([('a', attempt(5))]); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)], check=False, timeout=120)
    assert done.returncode == -9
    assert kept(tmp_path, ["a"]) == [5]
