"""`rollout.replay_experts`: a server that cannot say which experts it used is found before anything is
played.
"""

import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import trio

from agentrl.cluster.elastic import ElasticServers
from agentrl.cluster.frozen_servers import FrozenFleet
from agentrl.config.schema import Config
from agentrl.controller.attached import confirm_experts
from agentrl.errors import ConfigError
from agentrl.servers.client import SGLangClient

SETTINGS = {
    "/able": {"enable_return_routed_experts": True},
    "/unable": {"enable_return_routed_experts": False},
    "/old": {"tp_size": 1},
}


class Info(BaseHTTPRequestHandler):
    """Answers /server_info of several servers, one below each path."""

    def do_GET(self):
        body = json.dumps(SETTINGS[self.path.removesuffix("/server_info")]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        return


@pytest.fixture(scope="module")
def host():
    with ThreadingHTTPServer(("127.0.0.1", 0), Info) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def ask(urls, script):
    clients = [SGLangClient(url) for url in urls]
    try:
        return await script(clients)
    finally:
        for client in clients:
            await client.aclose()


def fleet_of(*urls, **more):
    return SimpleNamespace(talk=partial(trio.run, ask), wait_until_attached=lambda: list(urls), **more)


def config_of(*urls, replay_experts=True):
    return Config.model_validate({"rollout": {"urls": list(urls), "replay_experts": replay_experts}})


def test_servers_that_record_experts_are_taken(host):
    fleet, asked = fleet_of(host + "/able"), []

    def talk(urls, script):
        asked.extend(urls)
        return trio.run(ask, urls, script)

    fleet.talk = talk
    confirm_experts(config_of(host + "/able"), fleet)
    assert asked == [host + "/able"]


@pytest.mark.parametrize("name", ["/unable", "/old"])
def test_a_server_that_does_not_is_refused_in_one_line(host, name):
    urls = [host + "/able", host + name]
    with pytest.raises(ConfigError) as refusal:
        confirm_experts(config_of(*urls), fleet_of(*urls))
    assert str(refusal.value) == (
        f"rollout.replay_experts=true: {urls[1]} does not record which experts computed a token; start "
        "SGLang with --enable-return-routed-experts, and serve a mixture of experts; or use "
        "rollout.replay_experts=false"
    )


def test_nobody_is_asked_without_replay_or_without_attached_servers(host):
    asked = []
    fleet = fleet_of(host + "/unable")
    fleet.talk = lambda urls, script: asked.extend(urls)
    confirm_experts(config_of(host + "/unable", replay_experts=False), fleet)
    confirm_experts(config_of(), fleet)
    assert asked == []


@pytest.mark.parametrize("replays", [True, False])
def test_a_server_that_joins_later_is_asked_once(host, tmp_path, replays):
    said, removed, talked = [], [], []

    def talk(urls, script):
        talked.extend(urls)
        return trio.run(ask, urls, script)

    guests = [host + "/able", host + "/unable"]
    servers = SimpleNamespace(
        poll=lambda: None,
        talk=talk,
        remove=lambda url: (removed.append(url), guests.remove(url)),
        lines=[],
    )
    elastic = ElasticServers(
        servers,
        SimpleNamespace(outstanding_tokens=dict, lines=[], set_frozen_servers=lambda started: None),
        FrozenFleet(),
        lone_adapter_of=None,
        replays_experts=replays,
        run_dir=tmp_path,
        say=said.append,
    )
    for _ in range(2):
        servers.guests_needing_weights = list(guests)
        elastic.attend(version=0)
    assert removed == ([host + "/unable"] if replays else [])
    assert talked == ([host + "/able", host + "/unable"] if replays else [])
    assert len(said) == replays
    assert all("cannot join: " in line and "--enable-return-routed-experts" in line for line in said)
