"""A run behind SGLang's own router: agents generate through it, and it has exactly the servers with the
current weights behind it.
"""

import json
import subprocess
import time
import urllib.request

import pytest
import trio

from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.servers.front_router import SGLangRouter
from agentrl.servers.supervisor import Supervisor
from parts.learner import reserved_port
from sglang_cpu.environment import built_python

pytestmark = pytest.mark.sglang


def fetch(url):
    with urllib.request.urlopen(url, timeout=20) as reply:
        return reply.read().decode()


class RouterProcess:
    def __init__(self, log):
        self.url, self._metrics = (f"http://127.0.0.1:{reserved_port()}" for _ in range(2))
        port, metrics_port = self.url.rpartition(":")[2], self._metrics.rpartition(":")[2]
        command = [
            built_python(),
            "-m",
            "sglang_router.launch_router",
            "--host",
            "127.0.0.1",
            "--port",
            port,
            "--prometheus-port",
            metrics_port,
        ]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "--prometheus-port", metrics_port],
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
            )
        deadline = time.monotonic() + 60
        while not self.answers():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def answers(self):
        try:
            return bool(fetch(f"{self.url}/workers"))
        except OSError:
            return False

    def workers(self):
        return {worker["url"] for worker in json.loads(fetch(f"{self.url}/workers"))["workers"]}

    def num_generations(self):
        lines = fetch(f"{self._metrics}/metrics").splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("smg_http_requests_total") and "/generate" in line
        )


@pytest.fixture
def front(tmp_path):
    router = RouterProcess(tmp_path / "router.log")
    yield router
    router.process.kill()
    router.process.wait()


def start(world, folder, front, *overrides):
    return world.start(
        "train", str(world.config), f"trainer.run_dir={folder}", f"rollout.front_url={front.url}", *overrides
    )


@pytest.mark.timeout(900)
def test_it_trains_through_the_router_and_keeps_it_told(world, front):
    folder = world.folder / "front"
    run = world.start(
        "train",
        str(world.config),
        f"trainer.run_dir={folder}",
        "trainer.steps=1000",
        "rollout.num_servers=2",
        f"rollout.front_url={front.url}",
    )
    run.wait_until(lambda: world.num_steps(folder) >= 3, timeout_s=300)
    before = front.workers()
    assert len(before) == 2
    assert front.num_generations() >= 3 * 4 * 2, "each attempt of three steps generates at least once"

    run.kill_one("agentrl.extras.embedded")
    run.wait_until(lambda: "was restarted and gets version" in run.output(), timeout_s=300)
    steps = world.num_steps(folder)
    run.wait_until(lambda: world.num_steps(folder) >= steps + 3, timeout_s=300)
    assert len(front.workers()) == 2

    run.interrupt()
    assert run.wait() == 130, run.output()
    assert front.workers() == set()
    train = world.records(folder).train
    assert all(record["buffer/balanced"] for record in train if "buffer/balanced" in record)
    assert max(record["learner/mismatch_mean"] for record in train) < 0.05


@pytest.fixture
def foreign(world, tmp_path):
    launcher = EmbeddedServer(EmbeddedServerConfig(), "float32")
    supervisor = Supervisor(launcher, log_file=tmp_path / "server.log", start_timeout_s=180, max_restarts=0)
    yield supervisor.start(str(world.folder / "model"), "0")
    supervisor.stop()


@pytest.mark.timeout(600)
def test_a_router_with_somebody_elses_server_is_refused(world, front, foreign):
    trio.run(SGLangRouter(front.url, api_key=None).set_servers, {foreign: None})
    assert front.workers() == {foreign}
    run = start(world, world.folder / "foreign", front, "trainer.steps=1")
    assert run.wait(300) == 2, run.output()
    assert f"has the worker {foreign}, which is not a server of this run" in run.output()
    assert front.workers() == {foreign}
