"""A publish to two servers, of which one is killed, hangs or fails in the middle: never two servers on two
versions without a word.
"""

import os
import signal
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import orjson
import pytest
import trio

from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import WeightsConfig
from agentrl.http.client import HttpClient
from agentrl.learner.learner import LearnerSpec
from agentrl.servers.client import SGLangClient
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from agentrl.weights.publish import Publisher
from parts.http_answers import HttpResponse, serve_http
from parts.learner import lone_learner, write_tiny_model
from parts.played_server import PlayedServerLauncher

VOCABULARY = 61
TIMEOUT_S = 5.0
UPDATES = {"disk": "/update_weights_from_disk", "distributed": "/update_weights_from_distributed"}


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learner")
    write_tiny_model(folder, VOCABULARY, max_position_embeddings=512, eos_token_id=VOCABULARY - 1)
    spec = LearnerSpec(
        ModelConfig(path=str(folder)), LearnerConfig(), AlgorithmConfig(), "decoupled", 3, 1.0, 20
    )
    with lone_learner(spec) as one:
        yield SimpleNamespace(one=one, path=str(folder))


@pytest.fixture
def supervisors(both_servers):
    """Two servers that are up, whatever became of them before."""
    for each in both_servers:
        trio.run(until_alive, each)
    return both_servers


@pytest.fixture(scope="module")
def both_servers(learner, tmp_path_factory):
    launcher, logs = PlayedServerLauncher(), tmp_path_factory.mktemp("logs")
    both = [
        Supervisor(launcher, log_file=logs / str(i), start_timeout_s=240, max_restarts=5) for i in range(2)
    ]
    for each in both:
        each.start(learner.path, "default")
    yield both
    for each in both:
        each.stop()


class Struck(SGLangClient):
    """A client whose server is hit right after it was paused."""

    def __init__(self, url, strike):
        super().__init__(url)
        self._strike = strike

    async def pause(self, mode):
        await super().pause(mode)
        self._strike()


class StruckReceiver(SGLangClient):
    """A client whose server is hit before it is told of its second bucket."""

    def __init__(self, url, strike):
        super().__init__(url)
        self._strike, self._num_buckets = strike, 0

    async def update_weights_from_distributed(self, specs, **options):
        self._num_buckets += 1
        if self._num_buckets == 2:
            self._strike()
        await super().update_weights_from_distributed(specs, **options)


def publisher(workers, folder, transport):
    config = WeightsConfig(transport=transport, bucket_bytes=8192, verify=True, timeout_s=TIMEOUT_S)
    return Publisher(workers, config, folder=folder, pause_mode="abort")


async def version_of(client):
    """The version that a fresh generation carries."""
    return set((await client.generate([1, 2, 3], SamplingParams(4), rid="version")).versions.tolist())


async def until_alive(supervisor, *, not_pid=None):
    with trio.fail_after(240):
        while (status := supervisor.status()).state == "starting" or status.pid == not_pid:
            await trio.sleep(0.05)
        return status.url


def play(script):
    async def main():
        with trio.fail_after(400):
            return await script()

    return trio.run(main)


# A group waits for its deadline where a server stops in the middle: long, and tested with one that is killed.
SLOWLY = pytest.mark.slow


@pytest.mark.parametrize(
    ("number", "transport"),
    [
        pytest.param(signal.SIGSTOP, "disk", id="hangs-disk"),
        pytest.param(signal.SIGSTOP, "distributed", id="hangs-distributed", marks=SLOWLY),
        pytest.param(signal.SIGKILL, "disk", id="killed-disk"),
        pytest.param(signal.SIGKILL, "distributed", id="killed-distributed"),
    ],
)
def test_one_of_two_is_hit_in_the_middle(learner, supervisors, tmp_path, transport, number):
    well, hit = supervisors
    pid = hit.status().pid
    strike = partial(os.kill, pid, number)
    first, second = well.status().url, hit.status().url

    async def script():
        healthy = SGLangClient(first)
        victim = (Struck if transport == "disk" else StruckReceiver)(second, strike)
        publish = publisher(LocalWorker(learner.one), tmp_path, transport)
        report = await publish.publish(5, [healthy, victim])
        assert list(report.failed) == [second]
        assert second.removeprefix("http://") in report.failed[second]
        assert await version_of(healthy) == {5}
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            again = SGLangClient(await until_alive(hit))
        else:
            again = SGLangClient(await until_alive(hit, not_pid=pid))
        # Until it has the weights it serves nobody: it waits, or it has no version or an earlier one, and the
        # router sends it nothing.
        assert (await again.server_info())["is_paused"] or (await again.model_info()).version != 5
        report = await publish.publish(6, [healthy, again])
        assert (dict(report.failed), dict(report.repaired)) == ({}, {})
        assert await version_of(healthy) == await version_of(again) == {6}
        await publish.transport.close([healthy, again])
        for client in (healthy, victim, again):
            await client.aclose()

    play(script)


@asynccontextmanager
async def failing_proxy(url, path, *, num_failures):
    """A server that passes everything on to `url`, but answers `path` with 500 so often."""
    left = [num_failures]

    async def handle(request):
        if request.path == path and left[0] > 0:
            left[0] -= 1
            return HttpResponse(500, orjson.dumps({"error": {"message": "out of luck"}}))
        async with HttpClient(url) as http:
            reply = await http.request(
                request.method, request.path, json=orjson.loads(request.body) if request.body else None
            )
        return HttpResponse(reply.status, reply.body)

    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(serve_http, handle, [listener]))
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("num_failures", "transport"),
    [
        pytest.param(1, "disk", id="once-disk"),
        pytest.param(1, "distributed", id="once-distributed"),
        pytest.param(99, "disk", id="always-disk"),
        pytest.param(99, "distributed", id="always-distributed", marks=SLOWLY),
    ],
)
def test_one_of_two_answers_500(learner, supervisors, tmp_path, transport, num_failures):
    first, second = (each.status().url for each in supervisors)

    async def script():
        async with failing_proxy(second, UPDATES[transport], num_failures=num_failures) as url:
            healthy, failing, direct = SGLangClient(first), SGLangClient(url), SGLangClient(second)
            publish = publisher(LocalWorker(learner.one), tmp_path, transport)
            report = await publish.publish(7, [healthy, failing])
            assert await version_of(healthy) == {7}
            if num_failures == 1:
                assert dict(report.failed) == {}
                assert "out of luck" in report.repaired[url]
                assert await version_of(direct) == {7}
            else:
                assert list(report.failed) == [url]
                assert "out of luck" in report.failed[url]
                assert (await direct.server_info())["is_paused"]
            await publish.transport.close([healthy, failing])
            for client in (healthy, failing, direct):
                await client.aclose()

    play(script)


def test_a_server_that_was_gone_before_is_named_and_holds_up_nobody(learner, supervisors, tmp_path):
    url = supervisors[0].status().url

    async def script():
        healthy, gone = SGLangClient(url), SGLangClient("http://127.0.0.1:9")
        publish = publisher(LocalWorker(learner.one), tmp_path, "distributed")
        report = await publish.publish(8, [healthy, gone])
        assert list(report.failed) == [gone.url]
        assert await version_of(healthy) == {8}
        await publish.transport.close([healthy])
        await healthy.aclose()

    play(script)
