"""Games of TextArena, with a small package of the same entry points: who speaks, who is rewarded, and what is
no move of the policy is never scored as one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.config.agent import AgentConfig
from agentrl.config.data import DataConfig
from agentrl.config.opponents import OpponentConfig
from agentrl.data.checked_dataset import Playable, check_training_data
from agentrl.errors import ConfigError, DataError, EnvironmentFailed, UserError
from agentrl.extras.hubs.process import HubProcess
from agentrl.extras.hubs.textarena import Match, OpenMatch, TextArenaOptions, program_of
from agentrl.plugins import load_plugins
from agentrl.testing import Call, play, tiny_chat
from agentrl.types import Outcome
from parts.textarena_world import CONFIG, SMALL

OPTIONS = TextArenaOptions(**CONFIG)


def attempt(turns, *, agent: str = "textarena", row: dict | None = None, config=None, **settings):
    return play(
        turns,
        agent=agent,
        environment="textarena",
        environment_kwargs={"game": "Race-v0", **(row or {})},
        environment_config={"textarena": {**CONFIG, **(config or {})}},
        reward="textarena",
        prompt="to 4",
        **{"max_turns": 8, "trajectory_timeout_s": 60.0, **settings},
    )


def by_tool(*actions: str, **row):
    turns = [*(Call("act", {"action": action}) for action in actions), "done"]
    return attempt(turns, agent="tool_agent", row={"game": "Climb-v0", **row})


def rewards(played) -> list[float]:
    assert played.failure is None, played.failure
    return [event.value for event in played.rewards]


def spoken(played) -> dict[str, list[str]]:
    return {one.name: [message.content for message in one.messages] for one in played.conversations}


def test_the_tool_plays_a_game_for_one_player_to_its_end() -> None:
    played = by_tool("1", "[1]", "2")
    assert (played.outcome, rewards(played)) == (Outcome.COMPLETED, [1.0])
    told = [message.content for message in played.messages if message.role == "tool"]
    assert [text.split(",")[0] for text in told] == ["1", "2"]
    assert {"steps": 3.0, "is_over": 1.0, "is_invalid": 0.0}.items() <= {
        key.rsplit("/", 1)[-1]: value for key, value in played.metrics.items()
    }.items()


def test_a_move_that_the_rules_do_not_have_is_the_games_to_punish() -> None:
    played = by_tool("9")
    assert rewards(played) == [-1.0]
    assert played.metrics["reward/textarena/is_invalid"] == 1.0


def test_turns_play_a_game_for_one_player() -> None:
    played = attempt(["2", "2"], row={"game": "Climb-v0"})
    assert rewards(played) == [1.0]
    said = [message.content for message in played.messages]
    assert said[:2] == ["to 4", "2"]
    assert said[2].startswith("2, die ")
    assert played.segment_starts == (0,)


def test_one_policy_has_both_seats_and_each_is_rewarded_for_its_own() -> None:
    played = attempt(["1", "2", "1"])
    assert sorted(rewards(played)) == [-1.0, 1.0]
    said = spoken(played)
    assert said["player_0"][0] == "to 4"
    assert said["player_1"][0].startswith("to 4\n[Player 0] [1]\n1, die ")
    assert [text for text in said["player_0"] if text in "12"] == ["1", "1"]
    assert played.metrics["conversation/player_0/reward"] == 1.0
    assert played.metrics["conversation/player_1/reward"] == -1.0


@pytest.mark.parametrize("seat", [0, 1])
def test_an_opponent_speaks_in_the_other_seat_and_is_not_rewarded(seat: int) -> None:
    turns, others = (["1", "1"], ["2"]) if seat == 0 else (["2"], ["1", "1"])
    played = attempt(turns, row={"seat": seat, "opponent": "frozen"}, opponents={"frozen": others})
    assert rewards(played) == [1.0 if seat == 0 else -1.0]
    assert played.metrics[f"conversation/player_{seat}/reward"] == (1.0 if seat == 0 else -1.0)


def test_a_game_that_a_budget_ends_is_no_better_than_a_lost_one() -> None:
    played = attempt(["1"] * 9, row={"options": '{"goal": 99}'}, max_turns=3)
    assert played.outcome is Outcome.TURN_LIMIT
    assert rewards(played) == [-1.0, -1.0]
    assert played.metrics["reward/textarena/is_over"] == 0.0
    alone = attempt(["1"] * 9, row={"game": "Climb-v0", "options": '{"goal": 99}'}, max_turns=3)
    assert rewards(alone) == [-1.0]


@pytest.mark.parametrize(("move", "says"), [("crash", "no such move"), ("die", "ended with status 7")])
def test_a_game_that_fails_is_never_a_lost_one(move: str, says: str) -> None:
    played = attempt([move])
    assert (played.outcome, played.rewards) == (Outcome.ENVIRONMENT_ERROR, ())
    assert says in str(played.failure)
    played = by_tool(move)
    assert (played.outcome, played.rewards) == (Outcome.TOOL_ERROR, ())
    assert says in str(played.failure)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"game": ""}, "environment_kwargs need game"),
        ({"speed": 1}, "environment_kwargs need game"),
        ({"seed": -1}, "whole numbers from 0"),
        ({"options": "[]"}, "options must be a JSON object"),
        ({"seat": 0}, "with opponent"),
        ({"game": "Rase-v0"}, "did you mean Race-v0"),
        ({"game": "Wordy-v0"}, "LookupError: Resource words not found"),
        ({"options": '{"colour": 1}'}, "cannot be made: TypeError"),
        ({"players": 3}, "refuses 3 players: The number of players has to be 2"),
    ],
)
def test_rows_that_make_no_sense_are_refused(row, says) -> None:
    played = attempt(["1"], row=row)
    assert played.outcome is Outcome.ABORTED
    assert says in " ".join(str(played.failure).split())


def test_a_seat_that_the_game_does_not_have_is_refused() -> None:
    played = attempt(["1"], row={"seat": 2, "opponent": "frozen"}, opponents={"frozen": ["1"]})
    assert played.outcome is Outcome.ABORTED
    assert "has the seats 0 to 1, and the row's seat is 2" in str(played.failure)


def test_the_wrong_player_is_told_of_the_right_one() -> None:
    played = attempt([Call("act", {"action": "1"})], agent="tool_agent")
    assert (played.outcome, played.rewards) == (Outcome.ABORTED, ())
    assert "has 2 players; the agent 'textarena' plays it" in str(played.failure)
    played = play(["1"], agent="textarena")
    assert played.outcome is Outcome.ABORTED
    assert "needs the environment 'textarena'" in str(played.failure)


def test_modules_register_games_of_the_users() -> None:
    config = {"modules": ["own_game"]}
    assert rewards(attempt(["2", "2"], row={"game": "Own-v0"}, config=config)) == [1.0]
    played = attempt(["2"], config={"modules": ["no_such_module"]})
    assert played.outcome is Outcome.ABORTED
    assert "'no_such_module' cannot be imported" in str(played.failure)


async def told(process: HubProcess, seeds: list[int], order: list[int]) -> list[list[str]]:
    """Begin a game per seed, take actions in the given order of games, and return what each was told."""
    matches = [OpenMatch(process) for _ in seeds]
    for match, seed in zip(matches, seeds, strict=True):
        await match.begin(Match("Climb-v0", seed, '{"goal": 99}'), OPTIONS)
    seen: list[list[str]] = [[] for _ in seeds]
    for number in order:
        await matches[number].act("1")
        seen[number].append(matches[number].seen)
    for match in matches:
        await match.close()
    return seen


@settings(max_examples=10, deadline=None)
@given(seeds=st.lists(st.integers(0, 9), min_size=2, max_size=3), data=st.data())
def test_games_side_by_side_have_the_luck_of_games_alone(seeds: list[int], data: st.DataObject) -> None:
    order = data.draw(st.lists(st.sampled_from(range(len(seeds))), min_size=1, max_size=12))

    async def both() -> tuple[list[list[str]], list[list[str]]]:
        process = HubProcess(program_of(OPTIONS))
        try:
            mixed = await told(process, seeds, order)
            alone = [(await told(process, [seed], [0] * order.count(i)))[0] for i, seed in enumerate(seeds)]
        finally:
            await process.close()
        return mixed, alone

    mixed, alone = asyncio.run(both())
    assert mixed == alone


def test_a_game_that_never_returns_fails_and_the_others_go_on() -> None:
    async def played() -> None:
        process = HubProcess(program_of(OPTIONS))
        try:
            other, hanging = OpenMatch(process), OpenMatch(process)
            await other.begin(Match("Climb-v0"), OPTIONS)
            await hanging.begin(Match("Climb-v0"), OPTIONS.model_copy(update={"step_timeout_s": 0.2}))
            with pytest.raises(EnvironmentFailed, match="longer than step_timeout_s"):
                await hanging.act("hang")
            await other.act("2")
            assert other.seen.startswith("2, die")
        finally:
            await process.close()

    asyncio.run(played())
    failed = attempt(["hang"], config={"step_timeout_s": 0.5})
    assert (failed.outcome, failed.rewards) == (Outcome.ENVIRONMENT_ERROR, ())


def test_a_game_does_not_go_on_in_a_process_that_was_started_again() -> None:
    async def played() -> None:
        process = HubProcess(program_of(OPTIONS))
        try:
            match = OpenMatch(process)
            await match.begin(Match("Climb-v0"), OPTIONS)
            await process.close()
            with pytest.raises(EnvironmentFailed, match="the game is gone"):
                await match.act("1")
        finally:
            await process.close()

    asyncio.run(played())


def data(out: Path, *arguments: str) -> None:
    options = [f"--python={sys.executable}", f"--path={SMALL}", "--train=4", "--val=4"]
    if not any(argument.startswith("--games") for argument in arguments):
        options.append("--games=Race-v0,Climb-v0")
    result = CliRunner().invoke(
        app, ["data", "textarena", str(out), *options, *arguments], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output


def test_rows_are_written_and_can_be_played(tmp_path: Path) -> None:
    data(tmp_path, '--options={"Race-v0": {"goal": 3}}')
    train, val = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "val"))
    worlds = [row["extra_info"]["environment_kwargs"] for row in (*val, *train)]
    assert [world["seed"] for world in worlds] == list(range(8))
    assert [world["game"] for world in worlds] == ["Race-v0", "Climb-v0"] * 4
    assert [world["players"] for world in worlds] == [2, 1] * 4
    assert [row["agent_name"] for row in train] == ["textarena", "tool_agent"] * 2
    assert train[0]["prompt"][-1]["content"] == "to 3"
    row = {key: value for key, value in worlds[0].items() if key != "name"}
    assert sorted(rewards(attempt(["1", "2"], row=row))) == [-1.0, 1.0]


@pytest.mark.parametrize("options", [[], ["--turns"], ["--games=Race-v0", "--opponent=frozen"]])
def test_a_run_accepts_the_rows(tmp_path: Path, options: list[str]) -> None:
    data(tmp_path, *options)
    agent = AgentConfig(
        environment_config={"textarena": CONFIG},
        opponents={"frozen": OpponentConfig(urls=("http://127.0.0.1:30100",))},
    )
    rows = DataConfig(train_files=[str(tmp_path / "train.parquet")], max_prompt_tokens=512)
    assert check_training_data(rows, Playable(agent, load_plugins(), tiny_chat())) == 4


def test_an_opponent_plays_each_seat(tmp_path: Path) -> None:
    data(tmp_path, "--games=Race-v0", "--val-opponent=frozen", "--system=")
    train, val = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "val"))
    worlds = [row["extra_info"]["environment_kwargs"] for row in val]
    assert [(world["seat"], world["opponent"]) for world in worlds] == [(0, "frozen"), (1, "frozen")] * 2
    assert {row["extra_info"]["environment_kwargs"]["opponent"] for row in train} == {None}
    assert [message["role"] for message in train[0]["prompt"]] == ["user"]


def test_the_fewest_players_are_found_however_a_game_refuses_others(tmp_path: Path) -> None:
    """What a row shows is what its attempts begin with, whose number of players is known."""
    data(tmp_path, "--games=Choosy-v0")
    row, *_ = pq.read_table(tmp_path / "train.parquet").to_pylist()
    world = {key: value for key, value in row["extra_info"]["environment_kwargs"].items() if key != "name"}
    assert world["players"] == 2
    assert spoken(attempt(["1", "2", "1"], row=world))["player_0"][0] == row["prompt"][-1]["content"]


def test_turns_are_chosen_for_games_of_one_player(tmp_path: Path) -> None:
    data(tmp_path, "--games=Climb-v0", "--turns")
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert {row["agent_name"] for row in rows} == {"textarena"}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["--games=Rase-v0"], DataError, "did you mean Race-v0"),
        (["--games=Wordy-v0"], DataError, "Resource words not found"),
        (["--games=Race-v0,Race-v0"], ConfigError, "each once"),
        (["--options={"], ConfigError, "not valid JSON"),
        (["--players=7"], DataError, "refuses 7 players"),
        (["--games=Choosy-v0", "--players=1"], DataError, "refuses 1 players: Choosy is for 2 players"),
        (["--games=Climb-v0", "--opponent=frozen"], ConfigError, "has one player"),
        (["--python=/no/such/python"], ConfigError, "textarena.python='/no/such/python' is no program"),
    ],
)
def test_options_that_make_no_sense_are_one_line(tmp_path: Path, arguments, error, says) -> None:
    with pytest.raises(UserError) as refused:
        data(tmp_path, *arguments)
    assert type(refused.value) is error
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]


def test_a_package_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="No module named 'textarena'"):
        CliRunner().invoke(
            app,
            ["data", "textarena", str(tmp_path), "--games=Race-v0", f"--python={sys.executable}"],
            catch_exceptions=False,
        )
    assert not [*tmp_path.iterdir()]
