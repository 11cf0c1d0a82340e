"""Servers whose answers to everything but generations are broken, on real sockets: nothing hangs, and nobody
else is held up by them.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import trio

from agentrl.config.rollout import WeightsConfig
from agentrl.errors import ServerError
from agentrl.servers.client import SGLangClient
from agentrl.servers.health import ServerWatchdog, generates, kind_of
from agentrl.servers.router import Router
from agentrl.types import SamplingParams, TensorSpec
from agentrl.weights.publish import Publisher
from parts.raw_http import read_request, reply

DEADLINE_S = 3.0
SILENT = ("hangs", "drips")
FAULTS = [
    "500",
    "503",
    "404",
    "garbage",
    "no_json",
    "half_a_body",
    "drops",
    "hangs",
    "drips",
    "empty",
    "null",
    "a_list",
    "wrong_shape",
]
QUESTIONS = ["pulse", "loads", "server_info", "model_info", "is_paused", "max_adapter_rank", "checksums"]
WRONG_SHAPE = {
    "model_path": 3,
    "weight_version": "9" * 5000,
    "loads": [[]],
    "enable_lora": True,
    "dp_size": "many",
    "ranks": [{}],
}


class Faulty:
    """Answers all requests well, in one way or another wrongly, or never; `called` are the paths it was
    asked.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self.version = "3"
        self.called: list[str] = []

    async def handle(self, stream: trio.SocketStream) -> None:
        async with stream:
            while (request := await read_request(stream)) is not None:
                path, body = request
                self.called.append(path)
                try:
                    if not await self.respond(stream, path, body):
                        return
                except trio.BrokenResourceError:
                    return

    async def respond(self, stream: trio.SocketStream, path: str, body: dict) -> bool:
        """Tell whether the connection goes on."""
        answer = self.answer(path, body)
        if self.fault == "hangs":
            await trio.sleep_forever()
        if self.fault == "drops":
            return False
        if self.fault == "drips":
            for position in range(len(answer) - 1):
                await stream.send_all(answer[position : position + 1])
                await trio.sleep(0.05)
            await trio.sleep_forever()
        wrong = {
            "500": reply({"error": {"message": "out of luck"}}, status=500),
            "503": reply({}, status=503),
            "404": reply({"detail": "Not Found"}, status=404),
            "garbage": b"\x16\x03\x01 what?\r\n\r\n",
            "no_json": b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>",
            "half_a_body": answer[:-3],
            "empty": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "null": reply(None),
            "a_list": reply([]),
            "wrong_shape": reply(WRONG_SHAPE),
        }
        await stream.send_all(wrong.get(self.fault or "", answer))
        return self.fault not in ("half_a_body", "garbage")

    def answer(self, path: str, body: dict) -> bytes:
        if path == "/update_weights_from_disk":
            self.version = body["weight_version"]
        load = {
            "num_running_reqs": 0,
            "num_waiting_reqs": 0,
            "num_used_tokens": 7,
            "max_total_num_tokens": 99,
        }
        spans = [{"version": self.version, "start": 0, "end": 1}]
        meta = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, 1, None]],
            "weight_versions": spans,
        }
        answers = {
            "/generate": {"output_ids": [1], "meta_info": meta},
            "/model_info": {"model_path": "m", "weight_version": self.version},
            "/v1/loads": {"loads": [load]},
        }
        return reply(answers.get(path, {}))


@contextmanager
def serving(*servers: Faulty):
    """Yield the URLs of servers that live in a thread of their own: the watchdog runs a loop of its own for
    each look.
    """
    urls: list[str] = []
    is_up, run = threading.Event(), SimpleNamespace()

    async def main() -> None:
        run.token, run.scope = trio.lowlevel.current_trio_token(), trio.CancelScope()
        with run.scope:
            async with trio.open_nursery() as nursery:
                for server in servers:
                    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
                    nursery.start_soon(trio.serve_listeners, server.handle, listeners)
                    urls.append(f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}")
                is_up.set()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    is_up.wait()
    try:
        yield urls
    finally:
        trio.from_thread.run_sync(run.scope.cancel, trio_token=run.token)
        thread.join()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_question_is_answered_refused_or_cut_by_its_deadline(fault):
    server = Faulty()
    server.fault = fault

    async def ask(client: SGLangClient, name: str) -> None:
        with trio.move_on_after(0.2 if fault in SILENT else 60.0) as deadline:
            try:
                answer = await getattr(client, name)()
            except ServerError:
                return
            assert (name, answer) in [
                ("server_info", WRONG_SHAPE),
                ("is_paused", fault == "503"),
                ("is_paused", False),
            ]
        assert deadline.cancelled_caught == (fault in SILENT)

    async def main() -> None:
        client = SGLangClient(url)
        for name in QUESTIONS:
            await ask(client, name)
        await client.aclose()

    with serving(server) as [url]:
        trio.run(main)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_publish_names_who_is_broken_and_reaches_the_others_in_time(fault, tmp_path):
    well, ill = Faulty(), Faulty()
    ill.fault = fault
    answers = {"tensor_specs": [TensorSpec("a", "float32", (4,), 16)], "export": None}
    learner = SimpleNamespace(run=lambda method, *_: answers[method.__name__])
    config = WeightsConfig(timeout_s=DEADLINE_S)

    async def main():
        clients = [SGLangClient(url) for url in urls]
        publisher = Publisher(learner, config, folder=tmp_path, pause_mode="abort")
        with trio.fail_after(30 * DEADLINE_S):
            report = await publisher.publish(4, clients)
        for client in clients:
            await client.aclose()
        return report

    with serving(well, ill) as urls:
        report = trio.run(main)
    assert list(report.failed) == [urls[1]]
    assert (well.version, ill.version) == ("4", "3")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_watchdog_calls_it_hanging_and_returns_from_every_look(fault):
    server, now = Faulty(), [0.0]
    watchdog = ServerWatchdog(timeout_s=1.0, api_key=None, clock=lambda: now[0])
    with serving(server) as [url]:
        watchdog.begin(url)
        server.fault = fault
        now[0] = 0.5
        assert watchdog.probe() is None
        now[0] = 1.5
        assert "the server hung" in (watchdog.probe() or "")
        assert not generates(url, api_key=None, timeout_s=0.3)
        assert kind_of(url, api_key=None, timeout_s=0.3) in (None, "sglang")


@pytest.mark.parametrize("fault", ["hangs", "drops", "a_list", "wrong_shape"])
def test_agents_go_on_beside_it(fault):
    """All that the router asks of the one fails, and so does what is generated on it; the other answers."""
    well, ill = Faulty(), Faulty()

    async def main():
        router = Router(SGLangClient, max_silence_s=0.2)
        async with trio.open_nursery() as nursery:
            router.set_servers(urls, version=3)
            nursery.start_soon(router.watch)
            with trio.fail_after(30):
                while router.num_up < 2:
                    await trio.sleep(0.01)
                ill.fault = fault
                for _ in range(8):
                    generation = await router.generate([5], SamplingParams(1), trajectory_key="t")
                    assert generation.token_ids.tolist() == [1]
                while router.num_up == 2 and "/generate" in ill.called[2:]:
                    await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await router.aclose()

    with serving(well, ill) as urls:
        trio.run(main)
