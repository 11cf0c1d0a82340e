"""The real TextArena, of a pinned version in an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import DataError
from agentrl.testing import Call, play
from agentrl.types import Outcome
from parts.installed import interpreter_with

TEXTARENA = "textarena==0.7.4"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter_with(TEXTARENA)


def rows_of(out: Path, python: str, *arguments: str) -> list[dict]:
    given = ["textarena", str(out), f"--python={python}", "--train=4", "--val=1", *arguments]
    result = CliRunner().invoke(app, ["data", *given], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return pq.read_table(out / "train.parquet").to_pylist()


def attempt(row: dict, python: str, turns, **settings):
    world = {key: value for key, value in row["extra_info"]["environment_kwargs"].items() if key != "name"}
    return play(
        turns,
        agent=row["agent_name"],
        environment="textarena",
        environment_kwargs=world,
        environment_config={"textarena": {"python": python}},
        reward="textarena",
        prompt=row["prompt"][-1]["content"],
        **{"max_turns": 12, "max_response_tokens": 4000, **settings},
    )


def rewards(played) -> list[float]:
    assert played.failure is None, played.failure
    return [event.value for event in played.rewards]


def test_a_number_is_guessed_by_the_tool_and_by_turns(python, tmp_path) -> None:
    options = ["--games=GuessTheNumber-v0", '--options={"GuessTheNumber-v0": {"max_number": 3}}']
    row, *_ = rows_of(tmp_path / "tool", python, *options)
    assert "guess the number between 1 and 3" in row["prompt"][-1]["content"]
    played = attempt(row, python, [Call("act", {"action": f"[{number}]"}) for number in (2, 1, 3)])
    first = next(message.content for message in played.messages if message.role == "tool")
    assert first in ("The target number is lower.", "The target number is higher.")
    assert rewards(played) == [1.0]
    row, *_ = rows_of(tmp_path / "turns", python, *options, "--turns")
    assert row["agent_name"] == "textarena"
    played = attempt(row, python, ["I think [2].", "1", "3"])
    assert rewards(played) == [1.0]
    assert played.segment_starts == (0,)


def test_two_seats_of_nim_are_played_by_one_policy(python, tmp_path) -> None:
    options = ["--games=Nim-v0", '--options={"Nim-v0": {"piles": [1, 2]}}']
    row, *_ = rows_of(tmp_path, python, *options)
    assert row["agent_name"] == "textarena"
    played = attempt(row, python, ["[0 1]", "1 1", "[1 1]"])
    assert played.metrics["conversation/player_0/reward"] == 1.0
    assert played.metrics["conversation/player_1/reward"] == -1.0
    said = {one.name: [message.content for message in one.messages] for one in played.conversations}
    assert said["player_1"][0].startswith("Welcome to Nim, Player 1!")
    assert "Player 0 removes 1 from pile 0." in said["player_1"][0]
    assert "Player 1 removes 1 from pile 1." in said["player_0"][2]


@pytest.mark.parametrize(("game", "players"), [("TwoDollar-v0", 2), ("Golf-v0", 2), ("Surround-v0", 2)])
def test_the_fewest_players_are_found_where_a_game_refuses_others_by_a_value_error(
    python, tmp_path, game, players
) -> None:
    rows = rows_of(tmp_path, python, f"--games={game}")
    assert {row["extra_info"]["environment_kwargs"]["players"] for row in rows} == {players}


def test_an_opponent_plays_against_the_policy(python, tmp_path) -> None:
    options = ["--games=Nim-v0", '--options={"Nim-v0": {"piles": [1, 2]}}', "--opponent=frozen"]
    _, row, *_ = rows_of(tmp_path, python, *options)
    assert row["extra_info"]["environment_kwargs"]["seat"] == 1
    played = attempt(row, python, ["[1 1]"], opponents={"frozen": ["[0 1]", "[1 1]"]})
    assert rewards(played) == [-1.0]


def test_a_wrong_move_is_told_once_and_loses_the_second_time(python, tmp_path) -> None:
    row, *_ = rows_of(tmp_path, python, "--games=TicTacToe-v0")
    played = attempt(row, python, ["the middle", "[77]"])
    assert played.metrics["conversation/player_0/reward"] == -1.0
    assert played.metrics["reward/textarena/is_invalid"] == 1.0
    told = [message.content for message in played.messages if message.role == "user"]
    assert "attempted an invalid move" in told[1]


def test_a_seed_begins_a_game_alike(python, tmp_path) -> None:
    options = ["--games=Minesweeper-v0,KuhnPoker-v0,TowerOfHanoi-v0", "--seed=5"]
    once, again = (rows_of(tmp_path / name, python, *options) for name in ("once", "again"))
    assert [row["prompt"] for row in once] == [row["prompt"] for row in again]


@pytest.mark.parametrize(
    ("game", "says"),
    [("Debate-v0", "OpenRouter API key not found"), ("Nimm-v0", "did you mean Nim-v0")],
)
def test_a_game_that_cannot_be_had_is_refused_in_one_line(python, tmp_path, monkeypatch, game, says) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(DataError, match=says) as refused:
        rows_of(tmp_path, python, f"--games={game}")
    assert "\n" not in str(refused.value)


def test_a_game_ends_within_its_budget(python, tmp_path) -> None:
    row, *_ = rows_of(tmp_path, python, "--games=TowerOfHanoi-v0", "--turns")
    played = attempt(row, python, ["[A C]", "[A B]", "[C B]"], max_turns=2)
    assert played.outcome is Outcome.TURN_LIMIT, played.failure
    assert rewards(played) == [-1.0]
