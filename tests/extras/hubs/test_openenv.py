"""Episodes of OpenEnv servers: played by tools and by turns, scored by the server's rewards, and what is no
answer of the policy is never scored as one.
"""

from __future__ import annotations

import threading
from itertools import count

import pytest

from agentrl.errors import ConfigError, UserError
from agentrl.extras.hubs.openenv import OpenEnvServer, answer_text
from agentrl.extras.hubs.openenv_rows import read_episode, read_server
from agentrl.extras.hubs.openenv_session import websocket_url
from agentrl.plugins.options import read_options
from agentrl.ports import ReservedPort
from agentrl.testing import Call, play
from agentrl.types import Outcome
from parts.openenv_server import counting, observed, openenv_server, refused


def attempt(url: str, turns, *, row: dict | None = None, server: dict | None = None, **settings):
    return play(
        turns,
        environment="openenv",
        environment_kwargs={"server": "s", "reset": '{"seed": 7}', "shown": "text", **(row or {})},
        environment_config={"openenv": {"servers": {"s": {"url": url, **(server or {})}}}},
        reward="openenv",
        max_turns=len(turns) + 1,
        **settings,
    )


def acts(*said: str):
    return [*(Call("act", {"action": {"say": word}}) for word in said), "done"]


def rewards(played) -> list[float]:
    assert played.outcome is Outcome.COMPLETED, played.failure
    return [event.value for event in played.rewards]


def answers(played, role: str = "tool") -> list[str]:
    return [message.content for message in played.messages if message.role == role]


def test_an_episode_is_played_by_a_tool_and_earns_the_servers_rewards() -> None:
    with openenv_server(counting) as url:
        played = attempt(url, acts("3", "1", "3", "3"))
        assert rewards(played) == [2.0]
        assert rewards(
            attempt(url, acts("3", "1"), reward_config={"reward_config": {"openenv": {"of": "last"}}})
        ) == [0.0]
    assert answers(played) == [
        "you said 3",
        "you said 1",
        "you said 3\n(the episode is over)",
        "error: the episode is over",
    ]
    facts = {"return": 2.0, "last_reward": 1.0, "steps": 3, "is_done": True}
    assert played.extra_info["environment_facts"] == facts


def test_an_episode_is_played_by_turns() -> None:
    with openenv_server(counting) as url:
        played = attempt(
            url,
            ["3", "2", "3"],
            row={"field": "say"},
            agent="interaction_agent",
            interaction="openenv",
        )
    assert rewards(played) == [2.0]
    assert answers(played, "user")[1:] == ["you said 3", "you said 2"]


def test_an_action_that_does_not_fit_costs_nothing_but_the_turn() -> None:
    with openenv_server(counting) as url:
        turns = [Call("act", {"action": {"shout": "3"}}), *acts("3")]
        played = attempt(url, turns)
    assert answers(played) == ["error: say: Field required", "you said 3"]
    assert rewards(played) == [1.0]


def test_the_tools_of_an_mcp_environment_are_called() -> None:
    def session():
        def answer(message):
            asked = message["data"]
            if message["type"] == "reset":
                return observed("")
            if asked["tool_name"] != "add":
                error = {"error_type": "tool_not_found", "message": "no such tool"}
                return {"type": "observation", "data": {"observation": {"error": error}, "done": False}}
            total = sum(asked["arguments"].values())
            content = {"content": [{"type": "text", "text": str(total)}]}
            return {
                "type": "observation",
                "data": {"observation": {"result": content}, "reward": 1, "done": True},
            }

        return answer

    with openenv_server(session) as url:
        add = {"tool": "add", "arguments": {"a": 2, "b": 3}}
        played = attempt(
            url, [Call("call", {**add, "tool": "sub"}), Call("call", add), "5"], row={"shown": ""}
        )
    assert answers(played) == ["error: no such tool", "5"]
    assert rewards(played) == [1.0]


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (None, "was lost"),
        ("no json", "answered something else than its protocol"),
        ({"type": "state", "data": {}}, "in place of its observation"),
        ({"type": "observation", "data": {"observation": 3}}, "in place of an observation"),
        (
            {"type": "observation", "data": {"observation": {"text": "x"}, "reward": "much"}},
            "in place of an observation",
        ),
        (
            '{"type": "observation", "data": {"observation": {"text": "x"}, "reward": NaN}}',
            "gave the reward nan",
        ),
        (
            {"type": "observation", "data": {"observation": {"other": "x"}}},
            "has no field 'text'; it has other",
        ),
        (refused("EXECUTION_ERROR", "division by zero"), "division by zero"),
    ],
)
def test_a_server_that_fails_in_a_step_is_never_a_wrong_answer(reply, says) -> None:
    def session():
        replies = iter([observed("begin"), reply])
        return lambda message: next(replies)

    with openenv_server(session) as url:
        played = attempt(url, acts("3"))
        assert (played.outcome, played.rewards) == (Outcome.TOOL_ERROR, ())
        assert says in str(played.failure)


def test_a_server_that_is_not_there_is_never_a_wrong_answer() -> None:
    with ReservedPort() as port:
        played = attempt(f"http://127.0.0.1:{port.number}", acts("3"))
    assert (played.outcome, played.rewards) == (Outcome.ENVIRONMENT_ERROR, ())
    assert f"127.0.0.1:{port.number} cannot be reached" in str(played.failure)


def test_a_server_whose_environment_cannot_begin_is_never_a_wrong_answer() -> None:
    with openenv_server(lambda: lambda message: refused("FACTORY_ERROR", "no database")) as url:
        played = attempt(url, acts("3"))
    assert played.outcome is Outcome.ENVIRONMENT_ERROR
    assert "no database (FACTORY_ERROR)" in str(played.failure)


def test_a_step_that_is_not_answered_in_time_is_never_a_wrong_answer() -> None:
    """The model is told, and may go on; but what it earned is not known."""
    release = threading.Event()

    def session():
        def answer(message):
            if message["type"] == "step":
                release.wait(60)
            return observed("begin")

        return answer

    with openenv_server(session) as url:
        try:
            played = attempt(url, acts("3"), tool_timeout_s=0.2)
        finally:
            release.set()
    assert answers(played) == ["timed out after 0.2 s"]
    assert played.outcome is Outcome.ENVIRONMENT_ERROR
    assert "a step was not answered" in str(played.failure)


def test_a_session_that_is_not_free_is_waited_for() -> None:
    numbers = count()

    def session():
        number = next(numbers)
        return counting() if number >= 2 else lambda message: refused("CAPACITY_REACHED")

    with openenv_server(session) as url:
        assert rewards(attempt(url, acts("3"))) == [1.0]
        assert next(numbers) == 3


def test_waiting_for_a_session_ends_at_the_deadline() -> None:
    with openenv_server(lambda: lambda message: refused("CAPACITY_REACHED")) as url:
        played = attempt(url, acts("3"), environment_timeout_s=0.3)
    assert played.outcome is Outcome.ENVIRONMENT_ERROR
    assert "timed out after 0.3 s" in str(played.failure)


def test_headers_come_from_variables_and_are_needed(monkeypatch) -> None:
    monkeypatch.delenv("SOME_TOKEN", raising=False)
    with openenv_server(counting) as url:
        server = {"headers_env": {"Authorization": "SOME_TOKEN"}}
        assert attempt(url, acts("3"), server=server).outcome is Outcome.ABORTED
        monkeypatch.setenv("SOME_TOKEN", "secret-token")
        played = attempt(url, acts("3"), server=server)
    assert rewards(played) == [1.0]
    assert "secret-token" not in repr(played)


@pytest.mark.parametrize(
    "row",
    [{"server": "t"}, {"reset": "[]"}, {"reset": "{"}, {"field": 3}, {"speed": 1}],
)
def test_rows_that_make_no_sense_are_refused(row) -> None:
    with openenv_server(counting) as url:
        played = attempt(url, acts("3"), row=row)
    assert played.outcome is Outcome.ABORTED
    assert "environment 'openenv'" in str(played.failure)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ({}, "set either url or command"),
        ({"url": "http://a", "command": ["b", "{port}"]}, "set either url or command"),
        ({"url": "a:80"}, "should begin with http"),
        ({"command": ["b"]}, "{port}"),
        ({"url": "http://a", "max_sessions": 0}, "max_sessions"),
    ],
)
def test_servers_that_make_no_sense_are_refused(server, says) -> None:
    with pytest.raises(ConfigError) as refused_:
        read_options(OpenEnvServer, server, plugin="server 's'")
    assert says in str(refused_.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: read_server("http://a"),
        lambda: read_server("a="),
        lambda: read_server("a={"),
        lambda: read_server("a={}"),
        lambda: read_episode("a", "[]", shown="", field=""),
        lambda: read_episode("a", "{", shown="", field=""),
        lambda: read_episode("a", '{"seed": 1}', shown="", field=""),
    ],
)
def test_options_that_make_no_sense_are_one_line(wrong) -> None:
    with pytest.raises(UserError) as refused_:
        wrong()
    assert "\n" not in str(refused_.value)


def test_where_the_websocket_is() -> None:
    assert websocket_url("http://127.0.0.1:8000/") == "ws://127.0.0.1:8000/ws"
    assert websocket_url("https://a.example/b") == "wss://a.example/b/ws"


def test_what_a_tools_result_says() -> None:
    assert (
        answer_text({"content": [{"type": "text", "text": "a"}, {"type": "image", "data": ""}]})
        == "a\n[image omitted]"
    )
    assert answer_text({"data": 3}) == '{"data": 3}'
    assert answer_text("a") == "a"


def test_a_partner_without_its_environment_is_refused() -> None:
    played = play(["3"], agent="interaction_agent", interaction="openenv")
    assert played.outcome is not Outcome.COMPLETED
    assert "needs the environment 'openenv'" in str(played.failure)
