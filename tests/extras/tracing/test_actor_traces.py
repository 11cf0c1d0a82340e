"""Attempts of a rollout actor reach a collector, with the pauses of servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.schema import Config
from agentrl.rollout.worker import RolloutSettings, RolloutWorker
from agentrl.types import Lease, ServerPause
from parts.collector import Collector
from parts.core_world import PLUGINS, SOURCE
from parts.span_trees import check_tree


class Parrot(ThreadingHTTPServer):
    """Speaks the routes of SGLang that playing needs; always answers `#### 42`.

    `gate` holds turns back, but no probes; `asked` is set by the first turn.
    """

    daemon_threads = True

    def __init__(self, chat: Chat) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.ids = [*chat.encode("#### 42"), chat.eos_token_ids[0]]
        self.gate = threading.Event()
        self.gate.set()
        self.asked = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Parrot

    def log_message(self, *args) -> None:
        return

    def do_GET(self) -> None:
        self._reply({"model_path": "parrot", "weight_version": "1"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        is_probe = asked.get("sampling_params", {}).get("max_new_tokens") == 1
        if self.path == "/generate" and not is_probe:
            self.server.asked.set()
            self.server.gate.wait(10)
        ids = self.server.ids[
            : asked.get("sampling_params", {}).get("max_new_tokens")
        ]  # a probe asks for one
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
            "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
        }
        self._reply({"output_ids": ids, "meta_info": meta})

    def _reply(self, body) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_tiny_tokenizer(path)
    return str(path)


@pytest.fixture
def parrot(chat) -> Iterator[Parrot]:
    server = Parrot(chat)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()


def config(folder: str, **groups) -> Config:
    return Config(
        model={"path": folder},
        agent={"tools": ("calculator",)},
        rollout={"group_size": 2},
        reward={"sources": {SOURCE: f"{PLUGINS}:Number"}},
        **groups,
    )


def in_thread(function) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def test_traces_reach_a_collector_with_the_pauses_of_servers(stage, folder, parrot):
    """The server is paused while it holds a turn back: the pause is a part of that generation."""
    parrot.gate.clear()
    with Collector() as collector:
        spans = {"endpoint": collector.url}
        part = RolloutWorker(RolloutSettings.of(config(folder, tracking={"spans": spans})), None)
        began = time.time_ns()
        part.set_servers({parrot.url: None}, 1)
        playing = in_thread(lambda: part.play([Lease(7, stage.task(), 1, 1)]))
        assert parrot.asked.wait(60)
        pauses = [ServerPause(url, began, time.time_ns()) for url in (f"{parrot.url}/", "http://other:1")]
        part.trace_pauses(pauses)
        parrot.gate.set()
        playing.join(60)
        part.stop()
        assert part.stats()["spans_sent"] == len(collector.spans) == 5
        assert part.span_problem() == ""
    [spans] = collector.traces.values()
    root = check_tree(spans)
    assert (root.attributes["agentrl.kind"], root.attributes["agentrl.reward"]) == ("validation", 1.0)
    named = {span.name: span for span in spans}
    assert named.keys() == {"attempt", "generate", "request", "publish pause", "reward"}
    assert named["request"].parent_id == named["publish pause"].parent_id == named["generate"].span_id
    assert named["request"].attributes["url.full"] == parrot.url
