"""What kinds of servers a config comes to, requests to a run from another shell, and the table they show."""

import fcntl
import json
import threading
from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.cluster.control import ActorLine, ControlDesk, ControlRequest, ask, format_servers, read_servers
from agentrl.cluster.servers import ServerLine
from agentrl.config.rollout import RolloutConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError, InfrastructureError

LOCAL, REMOTE = "http://127.0.0.1:30000", "http://10.0.0.7:30000"


@pytest.mark.parametrize(
    ("values", "num_started"),
    [
        ({}, 1),
        ({"num_servers": 3}, 3),
        ({"urls": [LOCAL]}, 0),
        ({"urls": [LOCAL], "num_servers": 2}, 2),
        ({"urls": [LOCAL], "num_servers": 0}, 0),
    ],
)
def test_servers_are_started_beside_attached_ones_only_when_they_are_counted(values, num_started):
    assert RolloutConfig(**values).num_started == num_started
    assert Config.model_validate({"rollout": values}).num_ranks.get("servers", 0) == num_started


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_servers": 0}, "starts no server, and urls is empty"),
        ({"urls": [REMOTE]}, "10.0.0.7:30000 is on another machine, .* set rollout.api_key_env"),
        (
            {"urls": ["localhost:30000"]},
            "'localhost:30000' is not the URL of a server; write http://HOST:PORT",
        ),
        (
            {"weights": {"pause_mode": "retract"}},
            "pause_mode=retract: the embedded server .* supports only abort",
        ),
        (
            {"backend": "sglang", "colocated": True, "weights": {"pause_mode": "retract"}},
            "colocated=true, servers release their memory",
        ),
    ],
)
def test_servers_that_cannot_be_are_refused_in_a_line(values, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**values)


def test_a_key_opens_other_machines_and_a_kind_has_its_pause_mode():
    mixed = RolloutConfig(
        urls=(REMOTE, "https://[::1]:1"), api_key_env="KEY", backend="sglang", num_servers=1
    )
    assert [mixed.pause_mode_of(kind) for kind in ("embedded", "sglang")] == ["abort", "retract"]
    held = RolloutConfig(backend="sglang", weights={"pause_mode": "in_place"})
    assert [held.pause_mode_of(kind) for kind in ("embedded", "sglang")] == ["abort", "in_place"]
    assert RolloutConfig(backend="sglang", colocated=True).pause_mode_of("sglang") == "abort"


def test_colocated_servers_need_the_learners_pool():
    pools = {
        "pools": {"a": {"gpus_per_node": 1}, "b": {"gpus_per_node": 1}},
        "roles": {"actor": "a", "servers": "b"},
    }
    with pytest.raises(ValueError, match="the servers are in pool b and the learner is in a"):
        Config.model_validate({"rollout": {"backend": "sglang", "colocated": True}, "placement": pools})
    Config.model_validate(
        {
            "rollout": {"backend": "sglang", "colocated": True},
            "placement": {"pools": {"a": {"gpus_per_node": 1}}},
        }
    )


# ------------------------------------------------------------------------------------------ requests to a run


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run that goes on: somebody holds its lock."""
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path


def ask_while_it_is_served(run_dir, desk, act, request):
    """Ask in one thread, serve in this one, as the driver does between two looks at the buffer."""
    outcome = []

    def asking():
        try:
            outcome.append(ask(run_dir, request, timeout_s=60))
        except (ConfigError, InfrastructureError) as error:
            outcome.append(error)

    thread = threading.Thread(target=asking)
    thread.start()
    while thread.is_alive():
        desk.serve(act)
        thread.join(0.01)
    return outcome[0]


def test_a_request_is_answered_once_and_leaves_nothing(run_dir):
    desk, seen = ControlDesk(run_dir), []

    def act(request):
        seen.append(request)
        if request.verb == "drain":
            raise ConfigError(f"{request.server} is not a server of this run")
        return "it joins"

    assert ask_while_it_is_served(run_dir, desk, act, ControlRequest(verb="start")) == "it joins"
    refused = ask_while_it_is_served(run_dir, desk, act, ControlRequest(verb="drain", server="http://x"))
    assert isinstance(refused, ConfigError)
    assert str(refused) == "http://x is not a server of this run"
    assert seen == [ControlRequest(verb="start"), ControlRequest(verb="drain", server="http://x")]
    assert [p for p in (run_dir / "control").rglob("*") if p.is_file()] == []


def test_what_is_no_request_is_refused_and_the_run_goes_on(run_dir):
    desk = ControlDesk(run_dir)
    for name, text in (
        ("1", "not json"),
        ("2", '{"verb": "shutdown"}'),
        ("3", '{"verb": "start", "command": "rm"}'),
    ):
        (run_dir / f"control/requests/{name}.json").write_text(text)
    desk.serve(lambda request: pytest.fail("nothing of it is a request"))
    answers = [json.loads((run_dir / f"control/answers/{name}.json").read_text()) for name in "123"]
    assert [answer["is_done"] for answer in answers] == [False, False, False]


def test_a_run_that_does_not_answer_is_asked_no_more(run_dir):
    desk = ControlDesk(run_dir)
    with pytest.raises(InfrastructureError, match=r"did not answer within 0\.3 s"):
        ask(run_dir, ControlRequest(verb="start"), timeout_s=0.3)
    desk.serve(lambda request: pytest.fail("it was withdrawn"))


def test_a_folder_without_a_run_is_named(tmp_path, run_dir):
    for folder, why in ((tmp_path / "nowhere", "not the folder of a run"), (run_dir, "still starting")):
        with pytest.raises(ConfigError, match=why):
            read_servers(folder)
    (tmp_path / "over").mkdir()
    (tmp_path / "over/.lock").touch()
    with pytest.raises(ConfigError, match="no run is active"):
        ask(tmp_path / "over", ControlRequest(verb="start"), timeout_s=1)


def test_a_request_of_a_run_that_is_over_is_not_done_by_the_next(run_dir):
    ControlDesk(run_dir)
    (run_dir / "control/requests/1.json").write_text('{"verb": "start"}')
    ControlDesk(run_dir).serve(lambda request: pytest.fail("it was for another run"))
    assert not (run_dir / "control/requests/1.json").exists()
    assert not (run_dir / "control/answers/1.json").exists()


def test_the_table_shows_every_server_with_its_state_and_what_it_says(run_dir):
    desk = ControlDesk(run_dir)
    lines = [
        ServerLine("server_0", LOCAL, "started", "embedded", "ready", 2, ""),
        ServerLine("server_1", "", "started", "embedded", "starting", 0, "the server hung\nmore"),
    ]
    actors = [ActorLine("rollout-0-ab", "playing", 1, 7, 30)]
    desk.show(lines, version=12, outstanding_tokens=lambda: {LOCAL: 4096}, actors=actors)
    asked_again = partial(pytest.fail, "nothing has changed")
    desk.show(lines, version=12, outstanding_tokens=asked_again, actors=actors)
    assert read_servers(run_dir).actors == tuple(actors)
    actors = [replace(actors[0], state="silent")]
    desk.show(lines, version=12, outstanding_tokens=lambda: {LOCAL: 4096}, actors=actors)
    assert read_servers(run_dir).actors == tuple(actors)
    text = format_servers(read_servers(run_dir)).splitlines()
    assert text[0].split() == ["server", "kind", "state", "version", "outstanding", "tokens", "restarts"]
    assert text[1].split() == [LOCAL, "embedded", "(started)", "ready", "12", "4096", "2"]
    assert text[2].split() == ["server_1", "embedded", "(started)", "starting", "-", "0", "0"]
    assert text[3] == "server_1: the server hung"
    shown = CliRunner().invoke(app, ["servers", "list", str(run_dir), "--json"])
    assert json.loads(shown.output)["version"] == 12
    wrong = CliRunner().invoke(app, ["servers", "add", str(run_dir)])
    assert "or --start" in str(wrong.exception)
