"""Games of the real Gymnasium: played by a tool, scored by their own rewards, whatever the model writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pyarrow.parquet as pq
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import ConfigError, DataError, PluginError, UserError
from agentrl.extras.hubs.gymnasium_game import OpenGame
from agentrl.extras.hubs.gymnasium_text import GAMES, describe_actions, read_action, seen_as
from agentrl.plugins import WrongCall
from agentrl.testing import Call, play
from agentrl.types import Outcome

LAKE = {"game": "FrozenLake-v1", "options": '{"is_slippery": false}'}


def acts(*actions: str, **row: Any):
    return play(
        [*(Call("act", {"action": action}) for action in actions), "done"],
        environment="gymnasium",
        environment_kwargs=row,
        reward="gymnasium",
        max_turns=len(actions) + 1,
        max_tool_output_tokens=500,
    )


def answers(trajectory) -> list[str]:
    return [message.content for message in trajectory.messages if message.role == "tool"]


def test_a_game_is_played_to_its_end_and_its_rewards_are_the_attempts() -> None:
    played = acts("down", "1", " Down ", "2", "right", "up", "down", "right", **LAKE)
    assert played.outcome is Outcome.COMPLETED, played.failure
    assert [event.value for event in played.rewards] == [0.0]
    walked = acts("down", "1", "right", "down", "right", "right", "left", **LAKE)
    assert walked.outcome is Outcome.COMPLETED, walked.failure
    assert [event.value for event in walked.rewards] == [1.0]
    told = answers(walked)
    assert told[0] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\nno points"
    assert len(told) == 5, "the end of the game ends the attempt: no turn reads the sixth answer"
    assert {"steps": 6.0, "is_over": 1.0}.items() <= {
        key.rsplit("/", 1)[-1]: value for key, value in walked.metrics.items()
    }.items()


def test_what_is_told_at_the_end_and_after_it() -> None:
    game = OpenGame(LAKE["game"], 0, LAKE["options"])
    *_, told = [game.act(action) for action in ("down", "down", "right", "down", "right", "right")]
    assert told.endswith("HFF[G]\n+1 points, the game is over")
    with pytest.raises(WrongCall, match="the game is over"):
        game.act("left")
    game.close()


@settings(max_examples=200)
@given(st.text(max_size=300) | st.sampled_from(["left", " UP", "3", "4", "-1", "02", "1,1", "left,"]))
def test_no_text_is_an_action_but_those_that_the_game_names(said: str) -> None:
    """What a model writes never raises anything but a wrong call, which names the right ones."""
    named = {
        *GAMES["FrozenLake"].actions,
        *(f"{'0' * zeros}{number}" for number in range(4) for zeros in range(9)),
    }
    if said.strip().lower() in named | {"-0"}:
        assert read_action(spaces.Discrete(4), GAMES["FrozenLake"].actions, said) in range(4)
    else:
        with pytest.raises(WrongCall, match="one of left, down, right, up"):
            read_action(spaces.Discrete(4), GAMES["FrozenLake"].actions, said)


@pytest.mark.parametrize(
    ("space", "said", "action"),
    [
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.MultiDiscrete([2, 3]), "1, 2", np.array([1, 2])),
        (spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)]), "1,2", (1, 2)),
        (spaces.Text(5, charset="abc"), "cab", "cab"),
    ],
)
def test_actions_of_every_kind_that_is_text(space, said, action) -> None:
    assert np.all(read_action(space, (), said) == action)
    assert describe_actions(space, ())
    for wrong in ("", "9", "1,2,9", "x" * 999, "1.5", "٣"):
        with pytest.raises(WrongCall):
            read_action(space, (), wrong)


def test_colours_become_brackets() -> None:
    assert (
        seen_as(0, "\n\x1b[41mS\x1b[0mF\x1b[35m\x1b[43mY\x1b[0m\x1b[0m\x1b[34;1mB\x1b[0m\n") == "[S]F<[Y]>(B)"
    )
    assert seen_as((np.int64(3), 0.25, np.array([1.0, 2.0], np.float32)), None) == "(3, 0.25, (1, 2))"


@pytest.mark.parametrize("game", ["Taxi-v4", "CliffWalking-v1", "Blackjack-v1"])
def test_to_stop_before_the_end_is_never_better_than_the_worst_end(game: str) -> None:
    quiet = acts(game=game, seed=1)
    assert [event.value for event in quiet.rewards] == [GAMES[game.rsplit("-", 1)[0]].unfinished]


@pytest.mark.parametrize("game", ["FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"])
def test_a_seed_begins_a_game_alike_and_actions_lead_alike(game: str) -> None:
    seen = []
    for _ in range(2):
        begun = OpenGame(game, 5, "{}")
        shown = [begun.seen]
        while not begun.is_over and begun.num_steps < 20:
            shown.append(begun.act("0"))
        seen.append((shown, begun.total))
        begun.close()
    assert seen[0] == seen[1]


def test_rows_begin_as_their_game_does(tmp_path: Path) -> None:
    options = json.dumps({"FrozenLake-v1": {"is_slippery": False}})
    arguments = ["gymnasium", str(tmp_path), "--games=FrozenLake-v1,Blackjack-v1", "--options", options]
    done = CliRunner().invoke(app, ["data", *arguments, "--train=6", "--val=4"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    seeds = {}
    for split, number in (("train", 6), ("val", 4)):
        rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        assert [row["data_source"].split("/")[1] for row in rows] == ["FrozenLake-v1", "Blackjack-v1"] * (
            number // 2
        )
        for row in rows:
            world = row["extra_info"]["environment_kwargs"]
            begun = OpenGame(world["game"], world["seed"], world["options"])
            assert row["prompt"][-1]["content"].endswith(f"\n\n{begun.seen}")
            begun.close()
        seeds[split] = {row["extra_info"]["environment_kwargs"]["seed"] for row in rows}
    assert not seeds["train"] & seeds["val"]


def test_rows_without_rules_show_the_first_state_only(tmp_path: Path) -> None:
    arguments = ["gymnasium", str(tmp_path), "--games=Blackjack-v1", "--no-about", "--system="]
    done = CliRunner().invoke(app, ["data", *arguments, "--train=3", "--val=0"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for row in pq.read_table(tmp_path / "train.parquet").to_pylist():
        (message,) = row["prompt"]
        begun = OpenGame("Blackjack-v1", row["extra_info"]["environment_kwargs"]["seed"], "{}")
        assert message["content"] == begun.seen
        begun.close()


class Picture(gymnasium.Env):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros((8, 8, 3), np.uint8), {}


class Steered(Picture):
    observation_space = spaces.Discrete(2)
    action_space = spaces.Box(-1, 1, (1,))


gymnasium.register("Picture-v0", Picture)
gymnasium.register("Steered-v0", Steered)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (["--games=FrozenLik-v1"], DataError, "FrozenLik"),
        (["--games=os:FrozenLake-v1"], DataError, "a row names no module"),
        (["--games=Picture-v0"], PluginError, "observations are 192 numbers"),
        (["--games=Steered-v0"], PluginError, "actions of the kind Box"),
        (["--games=Taxi-v4,Taxi-v4"], ConfigError, "each once"),
        (["--games=Taxi-v4", "--options={"], ConfigError, "not valid JSON"),
        (["--games=Taxi-v4", '--options={"Blackjack-v1": {}}'], ConfigError, "not in --games"),
        (["--games=Taxi-v4", '--options={"Taxi-v4": {"colour": 1}}'], DataError, "colour"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, arguments, error, says) -> None:
    with pytest.raises(UserError) as raised:
        CliRunner().invoke(app, ["data", "gymnasium", str(tmp_path), *arguments], catch_exceptions=False)
    assert type(raised.value) is error
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "train.parquet").exists()
