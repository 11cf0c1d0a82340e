"""What a fleet does about servers that restart, fail or lose their supervisor, on handles that are a few
lines each.
"""

from dataclasses import replace

import pytest

from agentrl.cluster import servers
from agentrl.cluster.pools import Seat
from agentrl.cluster.server_handle import SupervisorLost
from agentrl.cluster.servers import ServerFleet
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.servers.health import ServerStatus
from agentrl.servers.startup import Readiness

FAR = "http://10.0.0.9:30000"


class Handle:
    """A server that is in the state that a test gives it."""

    asked: list[tuple[str, str]] = []  # noqa: RUF012 # of all handles

    def __init__(self, name, origin, url, api_key):
        self.starting = {}
        self.name, self.origin, self.api_key = name, origin, api_key
        self.now, self.lost, self.calls = ServerStatus(url, "needs_weights", "embedded"), None, []

    @property
    def readiness(self):
        return Readiness("servers", int(self.now.state != "starting"), 1)

    def begin_status(self):
        self.asked.append(("begin", self.name))

    def status(self):
        self.asked.append(("end", self.name))
        if self.lost is not None:
            raise self.lost
        return self.now

    def mark_ready(self, url):
        self.now = replace(self.now, state="ready")

    def __getattr__(self, name):
        return lambda *args: self.calls.append(name)


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    """Two started servers and an attached one; `handles` are all that were ever made."""
    handles = []

    def started(name, *_, api_key, **__):
        handles.append(Handle(name, "started", f"http://127.0.0.1:{len(handles) + 1}", api_key))
        return handles[-1]

    def attached(url, *, api_key, **_):
        handles.append(Handle(url, "attached", url.rstrip("/"), api_key))
        return handles[-1]

    monkeypatch.setattr(servers, "StartedServer", started)
    monkeypatch.setattr(servers, "AttachedServer", attached)
    monkeypatch.setattr(ServerFleet, "_listens_to_the_network", lambda self: False)
    monkeypatch.setenv("KEY", "theirs")
    rollout = RolloutConfig(num_servers=2, urls=(FAR,), api_key_env="KEY", max_server_restarts=1)
    said = []
    fleet = ServerFleet.launch(rollout, ModelConfig(), [Seat(), Seat()], run_dir=tmp_path, say=said.append)
    fleet.handles, fleet.said = handles, said
    fleet.wait_until_ready()
    return fleet


def test_started_and_attached_servers_take_traffic_alike(fleet):
    urls = [handle.now.url for handle in fleet.handles]
    assert fleet.urls_needing_weights == urls
    assert fleet.urls == []
    assert fleet.readiness == Readiness("servers", 3, 3)
    assert fleet.wait_until_attached() == [FAR]
    fleet.mark_ready(urls)
    assert fleet.urls == urls
    fleet.restart(FAR)
    assert fleet.handles[2].calls[-1] == "restart"
    assert [(line.name, line.origin) for line in fleet.lines] == [
        ("server_0", "started"),
        ("server_1", "started"),
        (FAR, "attached"),
    ]
    fleet.close()
    assert all(handle.calls[-2:] == ["begin_stop", "stop"] for handle in fleet.handles)


def test_all_supervisors_are_asked_before_any_answer_is_awaited(fleet):
    Handle.asked.clear()
    fleet.poll()
    names = ["server_0", "server_1", FAR]
    assert Handle.asked == [("begin", name) for name in names] + [("end", name) for name in names]


def test_a_lost_supervisor_is_replaced_by_a_guest_in_its_seat_until_the_budget_is_spent(fleet):
    fleet.handles[0].lost = SupervisorLost("a server's supervisor died")
    fleet.poll()
    assert fleet.handles[0].calls[-1] == "stop"
    assert [handle.name for handle in fleet.handles] == ["server_0", "server_1", FAR, "server_2"]
    assert fleet.said == [
        "server http://127.0.0.1:1 is lost (a server's supervisor died); starting server_2 to replace it"
    ]
    fleet.poll()
    assert fleet.guests_needing_weights == ["http://127.0.0.1:4"]
    for lost in (1, 3):  # two started servers with a restart each, of which one is left
        fleet.handles[lost].lost = SupervisorLost("gone")
    fleet.poll()
    assert (
        "server http://127.0.0.1:4 is lost (gone), and rollout.max_server_restarts is used up; the run "
        "continues without this server" in fleet.said
    )


def test_the_run_ends_with_a_server_of_its_own_and_goes_on_without_a_guest(fleet):
    fleet.attach("http://127.0.0.1:7/")
    with pytest.raises(ConfigError, match="already serves this run"):
        fleet.attach("http://127.0.0.1:7")
    fleet.handles[3].now = replace(fleet.handles[3].now, state="failed", message="it hung")
    fleet.poll()
    assert [line.name for line in fleet.lines] == ["server_0", "server_1", FAR]
    fleet.handles[2].now = replace(fleet.handles[2].now, state="failed", message="it hung")
    with pytest.raises(InfrastructureError, match=f"server {FAR} is lost permanently: it hung"):
        fleet.poll()


def test_every_server_gets_the_key_that_is_its_own(fleet):
    assert {handle.api_key for handle in fleet.handles} == {"theirs"}  # api_key_env names one key for all
    fleet.handles[0].api_key = "ours"
    assert (fleet.key_of("http://127.0.0.1:1"), fleet.key_of(FAR), fleet.key_of("http://elsewhere")) == (
        "ours",
        "theirs",
        "theirs",
    )
