"""Opponents: frozen models that speak in a conversation, whose words are no tokens of the attempt."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from pydantic import ValidationError
from trio.testing import MockClock

from agentrl.adapters.catalog import open_plugins
from agentrl.config.agent import AgentConfig
from agentrl.config.opponents import OpponentConfig
from agentrl.data.checked_dataset import Playable
from agentrl.errors import ConfigError, DataError, RequestRefused, ServerError
from agentrl.rollout.opponents import Opponents
from agentrl.types import Generation, Message, Outcome, SamplingParams, Task
from parts.scripted import play, tiny_chat

NIM = Path(__file__).parents[2] / "examples" / "nim.py"
OWN = {"agent": "nim", "environment": "pile", "reward": "won", "plugins": [str(NIM)], "max_turns": 9}


def nim(turns, stones, *, opponents=None, **extra):
    return play(
        turns,
        prompt=str(stones),
        environment_kwargs={"stones": stones},
        extra_info=extra,
        opponents=opponents,
        **OWN,
    )


def test_one_policy_in_both_seats_and_each_seat_earns_its_own():
    trajectory = nim(["3", "1", "3"], 7)
    assert trajectory.failure is None
    said = [[(m.role, m.content) for m in one.messages] for one in trajectory.conversations[1:]]
    assert said == [
        [("user", "7"), ("assistant", "3"), ("user", "3"), ("assistant", "3")],
        [("user", "4"), ("assistant", "1")],
    ]
    names = [trajectory.conversations[index].name for index in trajectory.segment_conversations]
    assert names == ["first", "second"]
    rewards = {trajectory.turn_ids[e.position]: e.value for e in trajectory.rewards}
    assert rewards == {2: 1.0, 1: -1.0}
    assert trajectory.reward == 0.0


def test_a_wrong_move_loses_and_a_side_that_did_not_speak_earns_nothing():
    trajectory = nim(["9"], 7)
    assert trajectory.failure is None
    assert [e.value for e in trajectory.rewards] == [-1.0]
    assert trajectory.extra_info["environment_facts"] == {"winner": "second"}


def test_what_an_opponent_says_is_stored_and_is_no_token():
    trajectory = nim(["3", "1"], 8, side="second", opponent="frozen", opponents={"frozen": ["1", "3"]})
    # 8 - 1 = 7, - 3 = 4, - 3 = 1, - 1: the policy is second, and wins.
    first, second = trajectory.conversations[1:]
    assert first.opponent == "frozen"
    assert [m.content for m in first.messages] == ["8", "1", "4", "3"]
    assert [m.content for m in second.messages] == ["7", "3", "1", "1"]
    assert trajectory.segment_conversations == (2,)
    text = tiny_chat().decode(trajectory.token_ids.tolist())
    assert re.findall(r"assistant\n(\d)", text) == ["3", "1"]
    assert trajectory.num_action_tokens == int((trajectory.turn_ids >= 0).sum())
    assert np.unique(trajectory.turn_ids).tolist() == [-1, 0, 1]
    assert [e.value for e in trajectory.rewards] == [1.0]
    assert trajectory.metrics["num_opponent_turns"] == 2
    assert trajectory.metrics["accuracy"] == 1.0


def test_an_opponent_that_goes_on_forever_ends_the_attempt_by_its_own_budget():
    trajectory = play(
        lambda turn, prompt: "1",
        opponents={"frozen": lambda turn, prompt: "1"},
        prompt="9",
        environment_kwargs={"stones": 9},
        extra_info={"side": "second", "opponent": "frozen"},
        **{**OWN, "max_turns": 2},
    )
    assert trajectory.outcome is Outcome.TURN_LIMIT


class Server:
    """A client that fails as `answers` say: an exception is raised, a text is the finish reason."""

    def __init__(self, answers) -> None:
        self.answers, self.asked = list(answers), 0

    async def generate(self, input_ids, params, *, rid) -> Generation:
        self.asked += 1
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        ids = np.array([7], np.int32)
        return Generation(ids, np.zeros(1, np.float32), np.zeros(1, np.int32), answer)

    async def aclose(self) -> None:
        return


def ask(clock, *servers):
    urls = tuple(f"http://127.0.0.1:{number + 1}" for number in range(len(servers)))
    by_url = dict(zip(urls, servers, strict=True))
    opponents = Opponents({"old": OpponentConfig(urls=urls)}, lambda url, key: by_url[url])

    async def main():
        found = opponents.find("old")
        result = await found.generate([1], SamplingParams(4), trajectory_key="a")
        await opponents.aclose()
        return result

    return trio.run(main, clock=clock)


def test_a_failing_server_is_left_for_the_next_and_three_failures_are_an_error():
    clock = MockClock(autojump_threshold=0)
    bad, good = Server([ServerError("down")] * 9), Server(["stop"] * 9)
    assert ask(clock, bad, good).token_ids.tolist() == [7]
    assert good.asked == 1
    interrupted = Server(["abort", ServerError("down"), "abort", "stop"])
    with pytest.raises(ServerError, match="3 failures in a row"):
        ask(MockClock(autojump_threshold=0), interrupted)
    refusing = Server([RequestRefused("too long", status=400)])
    with pytest.raises(RequestRefused, match="too long"):
        ask(None, refusing)


def started(*, patience_s, **servers):
    """Return opponents with one that servers are started for, and the function that plays its turn."""
    config = {"old": OpponentConfig(model={"path": "old"})}
    opponents = Opponents(config, lambda url, key: servers[f"{url} {key}"], patience_s=patience_s)

    async def turn():
        found = opponents.find("old")
        return await found.generate([1], SamplingParams(4), trajectory_key="a")

    return opponents, turn


def test_a_turn_waits_while_the_server_of_a_started_opponent_starts_again():
    down, up = Server([ServerError("reset")] * 99), Server(["stop"])
    opponents, turn = started(patience_s=60.0, **{"http://a k": down, "http://b k": up})

    async def main(after_s):
        opponents.set_servers({"agent.opponents.old": {"http://a": "k"}})
        async with trio.open_nursery() as nursery:

            async def restart():
                await trio.sleep(after_s / 2)
                opponents.set_servers({"agent.opponents.old": {}})  # it is starting
                await trio.sleep(after_s / 2)
                opponents.set_servers({"agent.opponents.old": {"http://b": "k"}})

            nursery.start_soon(restart)
            return await turn()

    assert trio.run(main, 30.0, clock=MockClock(autojump_threshold=0)).token_ids.tolist() == [7]
    assert up.asked == 1
    with pytest.raises(ExceptionGroup) as caught:
        trio.run(main, 100.0, clock=MockClock(autojump_threshold=0))
    assert caught.group_contains(ServerError, match="failures in a row, the last: no server")


def test_a_request_to_a_server_that_left_is_made_again_elsewhere():
    class Silent(Server):
        async def generate(self, input_ids, params, *, rid):
            self.asked += 1
            await trio.sleep_forever()

    silent, up = Silent([]), Server(["stop"])
    opponents, turn = started(patience_s=60.0, **{"http://a k": silent, "http://b k": up})

    async def main():
        opponents.set_servers({"agent.opponents.old": {"http://a": "k"}})
        async with trio.open_nursery() as nursery:

            async def leave():
                await trio.testing.wait_all_tasks_blocked()
                opponents.set_servers({"agent.opponents.old": {"http://b": "k"}})

            nursery.start_soon(leave)
            return await turn()

    assert trio.run(main, clock=MockClock(autojump_threshold=0)).token_ids.tolist() == [7]
    assert (silent.asked, up.asked) == (1, 1)


def test_an_opponent_whose_server_is_down_is_no_lost_game():
    def broken(turn, prompt):
        raise ServerError("down")

    trajectory = nim(["3"], 8, side="second", opponent="frozen", opponents={"frozen": broken})
    assert trajectory.outcome is Outcome.MODEL_ERROR
    assert trajectory.rewards == ()


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"urls": []}, "an opponent needs a model: set model.path to have servers started, or urls"),
        ({"model": {"path": "old"}, "urls": ["http://127.0.0.1:1"]}, "name two models; set model.path"),
        (
            {"num_servers": 2, "urls": ["http://127.0.0.1:1"]},
            "num_servers=2 has no effect without model.path",
        ),
        ({"model": {"path": "old"}, "num_servers": 0}, "greater than or equal to 1"),
        ({"model": {"path": "old"}, "tokenizer": "here"}, "tokenizer='here' has no effect without urls"),
        ({"model": {"path": "old"}, "api_key_env": "KEY"}, "api_key_env='KEY' has no effect without urls"),
        ({"model": {"path": "s3://"}}, "s3://"),
        ({"refresh_steps": 0}, "greater than or equal to 1"),
        (
            {"refresh_steps": 2, "urls": ["http://127.0.0.1:1"]},
            "refresh_steps=2 replaces the weights of servers that the run starts, and urls=.* run already",
        ),
        ({"urls": ["http://10.0.0.7:1"]}, "set api_key_env"),
        ({"urls": ["localhost:1"]}, "is not the URL of a server"),
        ({}, "urls"),
    ],
)
def test_an_opponent_without_a_usable_server_is_refused(options, wrong):
    with pytest.raises(ValidationError, match=wrong):
        OpponentConfig(**options)


@pytest.mark.parametrize("name", ["a/b", "", "a b", "v1.2", "ü"])
def test_a_name_that_keys_metrics_and_logs_could_not_have_is_refused(name):
    with pytest.raises(
        ValidationError, match="cannot be the name of an opponent; use letters, digits, - and _"
    ):
        AgentConfig(opponents={name: {"refresh_steps": 2}})
    AgentConfig(opponents={"v1-2_b": {"refresh_steps": 2}})


def test_a_key_that_is_not_set_is_one_line(monkeypatch):
    monkeypatch.delenv("OLD_KEY", raising=False)
    opponents = Opponents({"old": OpponentConfig(urls=("http://127.0.0.1:1",), api_key_env="OLD_KEY")})
    with pytest.raises(ConfigError, match=r"agent.opponents.old.api_key_env='OLD_KEY'"):
        opponents.find("old")


def test_a_row_whose_opponent_has_no_server_is_refused_before_the_run():
    config = AgentConfig(plugins=(str(NIM),))
    playable = Playable(config, open_plugins(config), tiny_chat())
    task = Task(
        "val:3",
        "nim",
        (Message("user", "5"),),
        "nim",
        extra_info={"opponent": "frozen"},
        environment_kwargs={"name": "pile", "stones": 5},
    )
    with pytest.raises(DataError) as caught:
        playable.check(task)
    assert str(caught.value) == (
        "val:3: agent nim: opponent 'frozen' has no server: set agent.opponents.frozen.model.path or "
        "agent.opponents.frozen.urls; configured: none"
    )
