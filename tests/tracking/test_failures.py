"""Failed attempts: counted, told of at growing intervals, kept whatever becomes of them, and too many end a
run.
"""

from __future__ import annotations

import io
import itertools
import re
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.failures import FILE, FailureBook, failure_lines
from agentrl.errors import CheckpointError
from agentrl.rollout.attempt_log import MAX_REPORTED, AttemptLog
from agentrl.rollout.player import unplayed
from agentrl.rollout.recorder import Attempt
from agentrl.tracking.attempts import AttemptCounts, FailedAttempt, ended_in, troubles_text
from agentrl.tracking.console import PlainConsole
from agentrl.tracking.failures import MAX_LISTED, MAX_SAID, FailureTally
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.unwritten import UnwrittenFiles
from agentrl.types import BufferCounts, Failure, Lease, Message, Outcome, PluginId, Task

REWARD = PluginId("reward", "custom")
SEARCH = PluginId("tool", "search")
BOOM = Failure(
    "reward 'custom' raised KeyError: 'boom'",
    REWARD,
    "KeyError",
    "/home/me/mine.py:4",
    "Traceback\n  the frames\nKeyError",
)
TASK = Task("t:0", "sums", (Message("user", "?"),), "tool_agent")


def failed(
    failure: Failure = BOOM, *, outcome: Outcome = Outcome.REWARD_ERROR, became="dropped", group: int = 0
) -> FailedAttempt:
    return FailedAttempt(failure, outcome, became, "t:0", "sums", "tool_agent", group, 1, 7, 1234.5)


def tally(said: list[str], **options) -> FailureTally:
    return FailureTally(said.append, where="run/failures.parquet", **options)


# ---------------------------------------------------------------------------------------------------- telling


def test_the_first_of_a_kind_is_told_with_text_place_and_attempt():
    said: list[str] = []
    tally(said).add([failed(group=12)])
    assert said == [
        "attempt failed (reward_error, dropped): reward 'custom' raised KeyError: 'boom' at "
        "/home/me/mine.py:4\n"
        "  first seen in group 12, member 1, task t:0; all: run/failures.parquet"
    ]


@given(st.lists(st.integers(1, 400), max_size=30))
def test_later_ones_are_told_of_at_growing_intervals_and_with_the_true_count(batches):
    said: list[str] = []
    told = tally(said)
    for size in batches:
        told.add([failed()] * size)
    counts = [
        int(found[1]) for text in said[1:] if (found := re.match(r"(\d+) failures like this so far", text))
    ]
    assert len(counts) == max(0, len(said) - 1)
    assert all(later >= 3 * earlier for earlier, later in itertools.pairwise(counts))
    if batches:
        assert told.lines() == [f"{sum(batches)} x reward_error ({sum(batches)} dropped): {BOOM}"]


def test_a_text_that_differs_each_time_is_one_failure_and_another_line_is_another():
    said: list[str] = []
    told = tally(said)
    told.add([failed(Failure(f"row {row}", REWARD, "KeyError", "mine.py:4")) for row in range(5)])
    told.add([failed(Failure("row 5", REWARD, "KeyError", "mine.py:5"))])
    assert len(said) == 2


def test_a_plugin_that_fails_in_hundreds_of_places_does_not_hide_the_steps():
    said: list[str] = []
    told = tally(said)
    for line in range(200):
        told.add([failed(Failure("x", REWARD, "KeyError", f"mine.py:{line}"))] * (2 if line == 7 else 1))
    assert len(said) == MAX_SAID + 1
    assert "only recorded" in said[-1]
    lines = told.lines()
    assert len(lines) == MAX_LISTED + 1
    assert lines[0].startswith("2 x ")
    assert lines[-1] == f"{200 - MAX_LISTED} in {200 - MAX_LISTED} other ways"


def test_a_call_after_which_the_attempt_went_on_is_told_and_ends_nothing():
    said: list[str] = []
    told = tally(said)
    told.add([failed(became="went_on")] * 5)
    assert said[0].startswith("a failure that ended no attempt: reward 'custom'")
    assert told.lines() == [f"5 x reward_error (5 went on): {BOOM}"]
    assert told.most_common() == ""


@pytest.mark.parametrize("shows", [True, False])
def test_the_traceback_is_told_only_if_asked_for(shows):
    said: list[str] = []
    tally(said, shows_tracebacks=shows).add([failed()])
    assert ("the frames" in said[0]) == shows


def test_the_most_common_failure_is_that_of_this_process_and_of_what_counts():
    told = tally([])
    told.restore([failed()] * 9)
    assert told.most_common() == ""
    gone = Failure("no server", None, "ServerError")
    told.add([failed(gone, outcome=Outcome.MODEL_ERROR)] * 3 + [failed()])
    assert told.most_common() == "no server"
    assert told.most_common(ignored=frozenset({Outcome.MODEL_ERROR})) == str(BOOM)


# ---------------------------------------------------------------------------------------------------- keeping


def book(folder: Path, said: list[str], *, is_resumed: bool = False) -> FailureBook:
    return FailureBook(
        folder,
        say=said.append,
        unwritten=UnwrittenFiles(said.append),
        is_resumed=is_resumed,
        shows_tracebacks=False,
    )


def test_every_failed_attempt_is_a_row_with_all_that_is_known_of_it(tmp_path):
    kept = book(tmp_path, [])
    late = Failure("agent.trajectory_timeout_s=60 passed")
    kept.add(
        [failed(became="retried"), failed(late, outcome=Outcome.TIMEOUT, became="masked", group=3)], step=5
    )
    rows = pq.read_table(tmp_path / FILE).to_pylist()
    assert [row["became"] for row in rows] == ["retried", "masked"]
    first, second = rows
    assert (first["kind"], first["plugin"], first["error"], first["place"]) == (
        "reward",
        "custom",
        "KeyError",
        "/home/me/mine.py:4",
    )
    assert (first["text"], first["traceback"]) == (BOOM.text, BOOM.traceback)
    assert (first["step"], first["task_id"], first["group_id"], first["member"], first["version"]) == (
        5,
        "t:0",
        0,
        1,
        7,
    )
    assert first["time"].timestamp() == 1234.5
    assert (second["kind"], second["plugin"], second["place"], second["outcome"]) == (
        None,
        None,
        "",
        "timeout",
    )


def test_fifteen_thousand_failures_are_all_kept_in_little_room(tmp_path):
    kept = book(tmp_path, said := [])
    long = Failure(
        "agent 'a' raised PluginError: no key",
        PluginId("agent", "a"),
        "PluginError",
        "a.py:3",
        "frame\n" * 200,
    )
    for start in range(0, 15_000, 500):
        kept.add([failed(long, group=start + i) for i in range(500)], step=0)
    kept.write(is_last=True)
    table = pq.read_table(tmp_path / FILE)
    assert sorted(table["group_id"].to_pylist()) == list(range(15_000))
    assert (tmp_path / FILE).stat().st_size < 200_000
    assert len(said) < 12


def test_a_resumed_run_goes_on_with_the_file_and_another_begins_anew(tmp_path):
    book(tmp_path, []).add([failed(group=1)], step=1)
    resumed = book(tmp_path, said := [], is_resumed=True)
    assert said == []
    resumed.add([failed(group=2)], step=2)
    assert "; 1 before this process" in said[0]
    assert pq.read_table(tmp_path / FILE)["group_id"].to_pylist() == [1, 2]
    assert resumed.lines()[0].startswith("2 x reward_error (2 dropped)")
    book(tmp_path, [])
    assert not (tmp_path / FILE).exists()


def test_what_the_disk_does_not_take_is_in_the_next_write(tmp_path):
    folder = tmp_path / "run"
    kept = book(folder, said := [])
    folder.write_text("a file where the folder should be")
    kept.add([failed(group=1)], step=0)
    assert any(text.startswith(FILE) for text in said)
    folder.unlink()
    kept.add([failed(group=2)], step=0)
    assert pq.read_table(folder / FILE)["group_id"].to_pylist() == [1, 2]


def test_secrets_in_urls_are_neither_told_nor_kept(tmp_path):
    kept = book(tmp_path, said := [])
    kept.add([failed(Failure("no answer of http://me:hunter2@host"))], step=0)
    assert "hunter2" not in "".join(said) + str(pq.read_table(tmp_path / FILE).to_pylist())


# --------------------------------------------------------------------------------------------------- counting


def ended(log: AttemptLog, outcome: Outcome, number: int, failure: Failure | None = None) -> None:
    attempt = Attempt(number, 0, TASK)
    log.ended(
        unplayed(attempt, outcome, failure or Failure("x")).replace(failure=failure),
        Lease(number, TASK, 1, 7),
        "dropped",
    )


def test_the_driver_gets_each_failure_once_even_if_an_answer_was_lost():
    log = AttemptLog()
    for number in range(MAX_REPORTED + 10):
        ended(log, Outcome.REWARD_ERROR, number, BOOM)
    first = log.since(0)
    assert log.since(0) == first, "its answer was lost: it is asked for again"
    second = log.since(first.position)
    assert [f.group_id for f in (*first.failed, *second.failed)] == list(range(MAX_REPORTED + 10))
    assert log.since(second.position).failed == ()
    assert second.counts.failed == Counter({REWARD: MAX_REPORTED + 10})


@pytest.mark.parametrize("is_training", [True, False])
def test_a_tool_that_fails_while_attempts_go_on_is_counted_once_for_each(is_training):
    log, search = AttemptLog(), PluginId("tool", "search")
    away = Failure("away", search, "OSError", "mine.py:4")
    lease, survived = Lease(0, TASK, 1, 7), [away, away]
    log.survived(
        unplayed(Attempt(0, 0, TASK), Outcome.COMPLETED, away).replace(failure=None),
        lease,
        survived,
        is_training=is_training,
    )
    survived = [away]
    last = unplayed(Attempt(1, 0, TASK), Outcome.TOOL_ERROR, away)
    log.survived(last, lease, survived, is_training=is_training)
    log.ended(last, lease, "dropped")
    report = log.since(0)
    assert [f.became for f in report.failed] == ["went_on"] * 3 + ["dropped"]
    assert {f.outcome for f in report.failed} == {Outcome.TOOL_ERROR}
    assert report.counts.failed == {search: 1 + is_training}


def test_metrics_are_counts_and_the_shares_that_failed():
    counts = AttemptCounts(
        Counter({Outcome.COMPLETED: 6, Outcome.REWARD_ERROR: 2}), Counter({REWARD: 4}), Counter({REWARD: 2})
    )
    assert counts.metrics() == {
        "attempts/ended": 8,
        "attempts/failed": 2,
        "attempts/completed": 6,
        "attempts/reward_error": 2,
        "attempts/failed_share": 0.25,
        "attempts/failed_share/reward/custom": 0.5,
    }
    records = [StepRecord("train", step, step, 0.0, counts.metrics()) for step in (1, 2)]
    assert ended_in(records).words() == "16 ended, 12 completed, 4 failed (25.0 %: reward_error 4)"
    assert AttemptCounts().metrics() == {"attempts/ended": 0, "attempts/failed": 0}


def test_a_step_tells_its_troubles_only_if_it_had_some():
    assert troubles_text({"attempts/failed": 0.0, "rollout/retried": 0.0}) == ""
    values = {
        "attempts/failed": 5.0,
        "rollout/retried": 1.0,
        "rollout/replaced": 2.0,
        "rollout/dropped_groups": 4.0,
    }
    assert troubles_text(values) == "5 failed  3 retried  4 groups dropped"
    out = io.StringIO()
    console = PlainConsole(9, stream=out)
    console.log(StepRecord("train", 1, 1, 1.0, values))
    console.log(StepRecord("train", 2, 2, 2.0, {}))
    first, second = out.getvalue().splitlines()
    assert first.endswith("5 failed  3 retried  4 groups dropped")
    assert "failed" not in second


def test_groups_are_counted_in_words():
    counts = BufferCounts(44, 0, 6, 4, 30, {"reward_error": 3, "stale": 1}, {"late": 2})
    assert str(counts) == (
        "44 drawn, 30 trained on, 6 being played, 4 ready, 4 dropped (reward_error 3, stale 1), 2 single "
        "attempts discarded (late 2)"
    )


# ----------------------------------------------------------------------------------------------------- ending


@pytest.mark.parametrize("content", [b"", b"PAR1 but not for long", b"\x00" * 400])
def test_a_damaged_file_is_one_line_and_is_left_as_it_is(tmp_path: Path, content: bytes):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"{FILE} cannot be read as .+; move it away to continue without its rows"
    ):
        failure_lines(tmp_path / FILE)
    assert (tmp_path / FILE).read_bytes() == content
