"""Transport `distributed` to servers of several ranks: each rank joins the group, and receives every
weight.
"""

import multiprocessing
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import orjson
import pytest
import trio

from agentrl.cluster.workers import LocalWorker
from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.rollout import WeightsConfig
from agentrl.errors import ServerError
from agentrl.learner.learner import LearnerSpec
from agentrl.servers.client import SGLangClient
from agentrl.servers.protocol import parse_num_ranks
from agentrl.weights.publish import Publisher
from parts.http_answers import HttpResponse, serve_http
from parts.learner import lone_learner, update_once, write_tiny_model
from parts.weights_rank import rank

VOCABULARY = 61


class WideServer:
    """What SGLang with `tp_size` and `pp_size` does about weights: its ranks are processes, and join one
    behind the other.
    """

    def __init__(self, context, **sizes):
        self._sizes, self.version, self.sums, self.joined = sizes, "default", [], None
        self._pipes, self._ranks = [], []
        for _ in range(parse_num_ranks(sizes, server="this")):
            own, theirs = context.Pipe()
            self._pipes.append(own)
            self._ranks.append(context.Process(target=rank, args=(theirs,), daemon=True))
            self._ranks[-1].start()

    async def handle(self, request):
        body = orjson.loads(request.body) if request.body else {}
        if request.path == "/init_weights_update_group":
            self.joined = (body["rank_offset"], body["world_size"])
            names = {
                "address": body["master_address"],
                "port": body["master_port"],
                "world_size": body["world_size"],
            }
            names |= {"name": body["group_name"], "backend": body["backend"]}
            await self._order(
                "join", [names | {"rank": body["rank_offset"] + index} for index in range(len(self._pipes))]
            )
        elif request.path == "/update_weights_from_distributed":
            self.sums = await self._order("receive", [body] * len(self._pipes))
            self.version = body.get("weight_version", self.version)
        elif request.path == "/destroy_weights_update_group":
            await self._order("leave", [body] * len(self._pipes))
        answers = {
            "/server_info": self._sizes,
            "/model_info": {"model_path": "m", "weight_version": self.version},
        }
        return HttpResponse(200, orjson.dumps(answers.get(request.path, {"success": True})))

    async def _order(self, what, bodies):
        for pipe, body in zip(self._pipes, bodies, strict=True):
            pipe.send((what, body))
        return [await trio.to_thread.run_sync(pipe.recv) for pipe in self._pipes]

    @asynccontextmanager
    async def serve(self):
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(serve_http, self.handle, [listener]))
            yield SGLangClient(f"http://127.0.0.1:{listener.socket.getsockname()[1]}")
            nursery.cancel_scope.cancel()

    def stop(self):
        for pipe, process in zip(self._pipes, self._ranks, strict=True):
            pipe.send(None)
            process.join(10)


@pytest.fixture(scope="module")
def context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parts.weights_rank"])
    return context


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learner")
    write_tiny_model(folder, VOCABULARY)
    spec = LearnerSpec(
        ModelConfig(path=str(folder)), LearnerConfig(), AlgorithmConfig(), "decoupled", 3, 1.0, 20
    )
    with lone_learner(spec) as one:
        yield one


@pytest.mark.parametrize(
    ("sizes", "joins"),
    [
        (({"tp_size": 2}, {"tp_size": 2}), [(1, 5), (3, 5)]),
        pytest.param(
            ({"tp_size": 1}, {"tp_size": 2, "pp_size": 1}, {}),
            [(1, 5), (2, 5), (4, 5)],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ({"tp_size": 1, "pp_size": 2}, {"tp_size": 1}), [(1, 4), (3, 4)], marks=pytest.mark.slow
        ),
    ],
    ids=["two of tp 2", "mixed", "a pipeline"],
)
def test_every_rank_of_every_server_joins_and_gets_all_weights(learner, context, tmp_path, sizes, joins):
    servers = [WideServer(context, **each) for each in sizes]
    workers = LocalWorker(learner)
    config = WeightsConfig(transport="distributed", bucket_bytes=8192, timeout_s=60.0)

    async def script():
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(server.serve()) for server in servers]
            publisher = Publisher(workers, config, folder=tmp_path, pause_mode="abort")
            for version in (3, 4):  # the second one through the group that stands
                report = await publisher.publish(version, clients)
                assert (dict(report.failed), dict(report.repaired)) == ({}, {})
                for server in servers:
                    assert server.version == str(version)
                    assert len(server.sums) == parse_num_ranks(server._sizes, server="this")
                    assert all(sums == learner.checksums(None, False) for sums in server.sums)
                update_once(learner, VOCABULARY)
            assert [server.joined for server in servers] == joins
            await publisher.transport.close(clients)
            for client in clients:
                await client.aclose()

    async def within_a_minute():
        with trio.fail_after(100):
            await script()

    try:
        trio.run(within_a_minute)
    finally:
        for server in servers:
            server.stop()


def test_copies_of_a_model_in_one_server_are_refused_with_the_cure():
    with pytest.raises(
        ServerError, match=r"dp_size=2.*a server for each copy, or use rollout\.weights\.transport=disk"
    ):
        parse_num_ranks({"tp_size": 2, "dp_size": 2}, server="s")
    assert parse_num_ranks({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, server="s") == 4
    assert parse_num_ranks({"tp_size": None, "pp_size": 0}, server="s") == 1
