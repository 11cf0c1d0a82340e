"""Tasks in the layout of tau2-bench on the desk of examples/: the whole way from the file of tasks to a
reward, with a customer whose words come from a server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import ConfigError, DataError, PluginError, UserError
from agentrl.extras.hubs.tau2 import said_text
from agentrl.extras.hubs.tau2_tasks import ExpectedCall
from agentrl.testing import Call, play
from agentrl.types import Message, Outcome
from parts.json_server import completion, json_server

EXAMPLES = Path(__file__).parents[3] / "examples"
DESK = EXAMPLES / "desk"
CONFIG = {"database": str(DESK / "database.json")}


def data(out: Path, *arguments: str, tasks: Path = DESK / "tasks.json") -> str:
    given = [
        *("--tasks", str(tasks), "--environment", "desk", "--plugin", str(EXAMPLES / "desk.py")),
        *("--policy", f"@{DESK}/policy.md", "--config", json.dumps(CONFIG)),
    ]
    done = CliRunner().invoke(app, ["data", "tau2", str(out), *given, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("desk")
    data(out, "--val=1")
    found = [row for split in ("val", "train") for row in pq.read_table(out / f"{split}.parquet").to_pylist()]
    return {row["extra_info"]["id"]: row for row in found}


def attempt(row: dict, turns, *, customer, **settings):
    """Play a row; `customer(what the policy said last)` is what the customer's model says."""
    extra = row["extra_info"]
    with json_server(lambda body: completion(customer(body["messages"]))) as url:
        return play(
            turns,
            agent=row["agent_name"],
            prompt=[Message(message["role"], message["content"]) for message in row["prompt"]],
            environment=f"{EXAMPLES}/desk.py:Desk",
            environment_kwargs={"database": extra["environment_kwargs"]["database"]},
            environment_config={"desk": CONFIG},
            interaction="simulated_user",
            interaction_kwargs={key: extra["interaction_kwargs"][key] for key in ("persona", "goal")},
            interaction_config={"simulated_user": {"url": url}},
            ground_truth=row["reward_model"]["ground_truth"],
            reward="tau2",
            **{"max_turns": 8, "max_response_tokens": 4000, **settings},
        )


def in_turn(*says: str):
    words = iter(says)
    return lambda messages: next(words)


def rewards(played) -> list[float]:
    assert played.failure is None, played.failure
    return [event.value for event in played.rewards]


CHANGED = [
    "Hello. What is your name?",
    Call("find_bookings", {"guest": "Ada Okoye"}),
    Call("change_nights", {"number": "A17", "nights": 5}),
]


def test_a_wish_that_is_fulfilled_and_told_is_worth_a_point(rows) -> None:
    seen: list[list[dict]] = []

    def customer(messages: list[dict]) -> str:
        seen.append(messages)
        return "Ada Okoye. Five nights, please." if len(seen) == 1 else "[DONE]"

    played = attempt(rows["longer"], [*CHANGED, "It is 600 now."], customer=customer)
    assert (played.outcome, rewards(played)) == (Outcome.COMPLETED, [1.0])
    assert played.metrics["reward/tau2/database"] == 1.0
    told = seen[0][0]["content"]
    assert "You are in a hurry" in told
    assert "five nights instead of three" in told
    assert "You know: Your name is Ada Okoye." in told
    assert "cannot be cancelled" not in str(seen), "the customer does not know the policy"
    assert "instead of three" not in str(played.messages), "the policy does not know the goal"


@pytest.mark.parametrize(
    ("turns", "database", "told"),
    [
        ([*CHANGED, "Done."], 1.0, 0.0),
        (["Your name?", "It is 600 now."], 0.0, 1.0),
        ([*CHANGED[:2], Call("change_nights", {"number": "B02", "nights": 5}), "It is 600."], 0.0, 1.0),
        ([*CHANGED, Call("cancel_booking", {"number": "B02"}), "It is 600."], 0.0, 1.0),
    ],
)
def test_half_of_it_is_worth_nothing(rows, turns, database: float, told: float) -> None:
    played = attempt(rows["longer"], turns, customer=in_turn("Ada Okoye.", "[DONE]"))
    assert rewards(played) == [0.0]
    assert played.metrics["reward/tau2/database"] == database
    assert played.metrics["reward/tau2/told"] == told


def test_a_wish_that_the_policy_forbids_is_right_if_nothing_changed(rows) -> None:
    words = ["Your name?", Call("show_booking", {"number": "N90"}), "One night cannot be cancelled."]
    assert rewards(attempt(rows["refused"], words, customer=in_turn("Mina Berg, N90", "[DONE]"))) == [1.0]
    words[1] = Call("cancel_booking", {"number": "N90"})
    assert rewards(attempt(rows["refused"], words, customer=in_turn("Mina Berg, N90", "[DONE]"))) == [0.0]


def test_a_way_of_ones_own_to_the_same_database_is_right(rows) -> None:
    way = [
        "Your name?",
        Call("change_nights", {"number": "A17", "nights": 4}),
        Call("change_nights", {"number": "A17", "nights": 5}),
        "The price is 600.",
    ]
    assert rewards(attempt(rows["longer"], way, customer=in_turn("Ada Okoye", "[DONE]"))) == [1.0]


def task(**changes: Any) -> dict:
    criteria = {"actions": [{"action_id": "1", "name": "cancel_booking", "arguments": {"number": "C11"}}]}
    whole = {"id": "t", "user_scenario": {"instructions": "Cancel."}, "evaluation_criteria": criteria}
    return whole | changes


def written(tmp_path: Path, *tasks: Any) -> Path:
    file = tmp_path / "tasks.json"
    file.write_text(json.dumps(list(tasks)))
    return file


def test_calls_are_compared_where_the_task_says_so(tmp_path: Path) -> None:
    criteria = task()["evaluation_criteria"] | {"reward_basis": ["DB", "ACTION"]}
    data(tmp_path, tasks=written(tmp_path, task(evaluation_criteria=criteria)))
    (row,) = pq.read_table(tmp_path / "train.parquet").to_pylist()
    right = [Call("cancel_booking", {"number": "C11"}), "Cancelled."]
    assert rewards(attempt(row, right, customer=in_turn("[DONE]"))) == [1.0]
    assert rewards(attempt(row, ["Cancelled."], customer=in_turn("[DONE]"))) == [0.0]


@given(arguments=st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)), data=st.data())
def test_an_action_is_made_by_calls_that_agree_where_it_looks(arguments, data) -> None:
    other = data.draw(st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)))
    compared = data.draw(st.none() | st.lists(st.sampled_from("abc")))
    action = ExpectedCall(name="act", arguments=arguments, compare_args=compared)
    agree = all(arguments.get(key) == other.get(key) for key in (compared if compared is not None else "abc"))
    assert action.is_made_by("act", other) == agree
    assert not action.is_made_by("other", arguments)


def test_texts_are_compared_as_tau2_does() -> None:
    assert said_text("1,200") in said_text("That is 1200.")
    assert said_text("gate B") in said_text("To GATE b")


def test_tasks_that_need_more_are_left_out_and_counted(tmp_path: Path) -> None:
    user = {"action_id": "1", "name": "reboot", "arguments": {}, "requestor": "user"}
    file = written(
        tmp_path,
        task(),
        task(id="u", evaluation_criteria={"actions": [user]}),
        task(id="v", evaluation_criteria={"actions": [user]}),
        task(id="n", evaluation_criteria={"reward_basis": ["DB", "NL_ASSERTION"]}),
        task(id="m", initial_state={"message_history": [{}]}),
        task(id="o", evaluation_criteria=None),
    )
    said = data(tmp_path, tasks=file)
    assert "train.parquet: 1 row\n" in said
    for line in (
        "left out 2 tasks: tools of the customer",
        "left out 1 task: scored by NL_ASSERTION",
        "left out 1 task: calls or messages before the first turn",
        "left out 1 task: no evaluation_criteria",
    ):
        assert line in said
    assert said.count("left out") == 4


@pytest.mark.parametrize(
    ("tasks", "arguments", "error", "says"),
    [
        (['{"id": 3}'], [], DataError, "0: Input should be a valid dictionary"),
        ([{"id": "t"}], [], DataError, "0.user_scenario: Field required"),
        ([task(), task()], [], DataError, "two tasks have the id 't'"),
        ([task()], ["--val=1"], DataError, "--val=1 takes all"),
        ([task(evaluation_criteria=None)], [], DataError, "left out 1: no evaluation_criteria"),
        (
            [task(evaluation_criteria={"actions": [{"name": "fly", "arguments": {}}]})],
            [],
            DataError,
            "has no tool 'fly'; it has find_bookings",
        ),
        (
            [
                task(
                    evaluation_criteria={
                        "actions": [{"name": "cancel_booking", "arguments": {"number": "Z"}}]
                    }
                )
            ],
            [],
            DataError,
            "is refused: there is no booking 'Z'",
        ),
        (
            [task(evaluation_criteria={"actions": [{"name": "cancel_booking", "arguments": {}}]})],
            [],
            DataError,
            "is refused: 1 validation error",
        ),
        ([task()], ["--environment=disk"], PluginError, "disk"),
        ([task()], ["--partner=nobody"], PluginError, "nobody"),
        ([task()], ["--config=["], ConfigError, "--config: is not valid JSON"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, tasks, arguments, error, says) -> None:
    out = tmp_path / "out"
    with pytest.raises(UserError) as refused:
        data(out, *arguments, tasks=written(tmp_path, *tasks))
    assert type(refused.value) is error
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not out.exists() or not [*out.iterdir()]


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        data(tmp_path, tasks=tmp_path / "no.json")
