"""The rollout process without Ray around it: real HTTP to a server that says one sentence, calls from other
threads.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import trio

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config
from agentrl.data.trajectories import decode, from_ipc
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.rollout.limits import model_limits
from agentrl.rollout.worker import RolloutSettings, RolloutWorker
from agentrl.types import Lease, Outcome, Trajectory
from parts.core_world import PLUGINS, SOURCE


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


class LocalBuffer:
    """A replay buffer of two queues."""

    def __init__(self, leases: Sequence[Lease]) -> None:
        self.leases = list(leases)
        self.added: queue.Queue[Trajectory] = queue.Queue()

    async def lease(self, limit: int) -> Sequence[Lease]:
        if not self.leases:
            await trio.sleep_forever()
        taken, self.leases = self.leases[:limit], self.leases[limit:]
        return taken

    async def withdrawn(self) -> Sequence[int]:
        return ()

    async def add(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            self.added.put(trajectory)

    async def drop_group(self, group_id: int, reason: str) -> None:
        raise AssertionError(reason)

    async def leave_out(self, group_id: int, member: int, reason: str) -> None:
        raise AssertionError(reason)


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


def test_it_plays_training_and_validation_and_stops(stage, folder, parrot):
    buffer = LocalBuffer([Lease(group, stage.task(), 2, 1) for group in range(5)])
    part = RolloutWorker(RolloutSettings.of(config(folder)), buffer)
    part.set_servers({parrot.url: None}, 1)
    validated = decode(
        from_ipc(part.play([Lease(7, stage.task(), 1, 1)]))
    )  # before `run`, as a run validates first
    assert [(t.group_id, t.reward, t.min_version) for t in validated] == [(7, 1.0, 1)]
    running = in_thread(part.run)
    trained = [buffer.added.get(timeout=20) for _ in range(10)]
    assert sorted((t.group_id, t.member) for t in trained) == [(g, m) for g in range(5) for m in range(2)]
    assert {t.outcome for t in trained} == {Outcome.COMPLETED}
    assert part.stats()["finished"] == 11
    part.stop()
    running.join(10)
    assert not running.is_alive()
    part.stop()  # again: nothing happens


def test_stop_ends_what_is_under_way(stage, folder, parrot):
    parrot.gate.clear()
    part = RolloutWorker(RolloutSettings.of(config(folder)), None)
    part.set_servers({parrot.url: None}, 1)
    errors: list[Exception] = []

    def play() -> None:
        try:
            part.play([Lease(0, stage.task(), 1, 1)])
        except InfrastructureError as error:
            errors.append(error)

    playing = in_thread(play)
    assert parrot.asked.wait(20)
    part.stop()
    playing.join(10)
    assert not playing.is_alive()
    assert "stopped during validation" in str(errors[0])


def test_wrong_configs_are_named(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    keyless = Config().rollout.model_copy(update={"api_key_env": "NO_SUCH_KEY"})
    with pytest.raises(ConfigError, match=r"rollout\.api_key_env='NO_SUCH_KEY'"):
        RolloutWorker(RolloutSettings.of(config(folder).model_copy(update={"rollout": keyless})), None)
    with pytest.raises(ConfigError, match="does not exist"):
        RolloutWorker(RolloutSettings.of(config(str(tmp_path / "none"))), None)


@pytest.mark.parametrize(
    ("described", "limits"),
    [
        ({"vocab_size": 200, "max_position_embeddings": 2048}, (200, 2048)),
        ({"text_config": {"vocab_size": 201, "max_position_embeddings": 4096}}, (201, 4096)),
        ({"vocab_size": 100_000, "max_position_embeddings": 2048}, (None, 2048)),  # nothing to look for
    ],
)
def test_limits_come_from_the_model(chat, tmp_path, described, limits):
    assert model_limits(ModelConfig(path=str(tmp_path)), chat) == (None, None)
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert model_limits(ModelConfig(path=str(tmp_path)), chat) == limits
