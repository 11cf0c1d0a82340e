"""A run that stands still says what it waits for: a stuck tool, and processes that are stopped, are named;
the run ends all the same.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.training_buffer import BufferSettings
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.cluster.buffer import launch_buffer
from agentrl.cluster.cluster import ray_session
from agentrl.cluster.frozen_servers import FrozenFleet
from agentrl.cluster.rollouts import RolloutFleet
from agentrl.cluster.servers import ServerFleet
from agentrl.config.cluster import ClusterConfig
from agentrl.config.schema import Config
from agentrl.data.attempt_files import FOLDER, AttemptFiles
from agentrl.extras.watch.watchdog import Parts, WatchedRun
from agentrl.rollout.worker import RolloutSettings, RolloutWorker
from agentrl.tracking.metrics import PhaseTimer
from agentrl.tracking.watchdog import Watchdog
from parts.core_world import PLUGINS, SOURCE, write_sums

PLUGIN = """
import time

from agentrl.plugins import AgentLoop, Tool, ToolResult
from agentrl.types import ToolCall


class Stuck(Tool):
    name = "stuck"
    description = "never answers"
    parameters = {"type": "object", "properties": {}}

    async def call(self, arguments):
        while True:
            time.sleep(0.1)  # a mistake of many tools: it blocks the event loop of all of them


class StuckAgent(AgentLoop):
    name = "stuck_agent"

    async def run(self, task, session):
        await session.run_tools([ToolCall("c0", "stuck", {})])
"""


class Standstill:
    """A fleet of one rollout actor that plays two groups of one attempt, and a buffer, without servers and
    learner.
    """

    def __init__(self, folder: Path) -> None:
        write_tiny_tokenizer(folder / "model")
        write_sums(folder / "train.jsonl", 8, agents=("stuck_agent",))
        (folder / "stuck.py").write_text(PLUGIN)
        config = Config(
            data={"train_files": [str(folder / "train.jsonl")]},
            model={"path": str(folder / "model")},
            agent={"plugins": [str(folder / "stuck.py")], "tools": ["stuck"], "tool_timeout_s": 600.0},
            rollout={"group_size": 1, "max_concurrent_trajectories": 2},
            reward={"sources": {SOURCE: f"{PLUGINS}:Number"}},
            algorithm={"singleton": "raw"},
            buffer={"groups_per_step": 1, "max_staleness": 1},
            trainer={"steps": 4},
        )
        self.folder = folder
        self.said: queue.Queue[str] = queue.Queue()
        self.phases = PhaseTimer()
        self.buffer = launch_buffer(BufferSettings.of(config), str(folder), is_new=True, say=self.said.put)
        self.servers = ServerFleet(config.rollout, config.model, run_dir=folder, say=self.said.put)
        self.rollouts = RolloutFleet(
            RolloutSettings.of(config),
            self.buffer,
            AttemptFiles(folder / FOLDER, is_synced=False),
            key_of=self.servers.key_of,
        )
        self.rollouts.wait_until_ready()
        self.buffer.run(ReplayBuffer.resume, 0, None)
        self.buffer.run(ReplayBuffer.advance, 0, 0)
        self.rollouts.run()

    def watchdog(
        self, driver: threading.Thread | None = None, *, silence_s: float = 0.5, answer_s: float = 2.0
    ) -> Watchdog:
        driver = driver or threading.current_thread()
        frozen = FrozenFleet()
        parts = Parts(self.buffer, self.servers, frozen, self.rollouts, list, self.phases, driver)
        return Watchdog(
            WatchedRun(parts, answer_s=answer_s),
            silence_s=silence_s,
            folder=self.folder / "watchdog",
            say=self.said.put,
        )

    def wait_for(self, *words: str) -> str:
        """Return the first report that has all of them."""
        deadline = time.monotonic() + 100
        while True:
            report = self.said.get(timeout=deadline - time.monotonic())
            if all(word in report for word in words):
                return report


@contextlib.contextmanager
def stopped(title: str):
    """Stop the Ray worker of that title for the length of the block."""
    workers = [
        p for p in psutil.Process().children(recursive=True) if p.cmdline() and title in p.cmdline()[0]
    ]
    assert len(workers) == 1, title
    workers[0].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        workers[0].send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def standstill(tmp_path_factory):
    with ray_session(ClusterConfig()):
        parts = Standstill(tmp_path_factory.mktemp("standstill"))
        yield parts
        parts.rollouts.close()


def test_a_stuck_tool_is_named_with_its_group_and_member(standstill):
    with standstill.watchdog():
        report = standstill.wait_for("(stuck_agent)", "tool stuck", "members finished")
    assert "no progress for" in report
    assert "group 0 member 0 (stuck_agent)" in report
    assert "controller: between two phases for" in report
    owner = next(iter(standstill.rollouts.actors))
    assert f"group 0 leased to {owner} for" in report
    assert "stuck.py:" in report, "a tool that blocks the event loop is found in its file"
    file = Path(report.rpartition("full report: ")[2])
    assert file.parent == standstill.folder / "watchdog"
    assert "task AgentLoopManager" in file.read_text(), "the file has trio's own tree"
    assert "task AgentLoopManager" not in report


def test_what_an_actor_warns_of_is_said_once(standstill):
    said: list[str] = []
    deadline = time.monotonic() + 60
    while not said and time.monotonic() < deadline:
        standstill.rollouts.attempts(said.append)
        time.sleep(0.1)
    owner = next(iter(standstill.rollouts.actors))
    assert said[0].startswith(f"rollout actor {owner}: tool 'stuck' at {standstill.folder}/stuck.py:")
    assert "has not given back the event loop for 5 s" in said[0]
    standstill.rollouts.attempts(said.append)
    assert len(said) == 1


def test_a_stopped_rollout_actor_is_named(standstill):
    owner = next(iter(standstill.rollouts.actors))
    with stopped("ray::RolloutActor"), standstill.watchdog():
        report = standstill.wait_for(f"rollout actor {owner} does not answer")
    assert "replay buffer: " in report


def test_a_stopped_buffer_is_named_while_the_controller_waits_for_it(standstill):
    def drive() -> None:
        with standstill.phases("take"):
            standstill.buffer.run(ReplayBuffer.take, 1, 0.1, 1)

    driver = threading.Thread(target=drive)
    with stopped("ray::BufferActor"):
        driver.start()
        with standstill.watchdog(driver):
            report = standstill.wait_for("the replay buffer does not answer", "in phase 'take'")
            asked_to_end = time.monotonic()
        assert time.monotonic() - asked_to_end < 20, "the end of the run waits for the watchdog"
    driver.join(60)
    assert not driver.is_alive()
    assert "actors.py:" in report
    assert "(stuck_agent)" in report, "the others are asked all the same"


def test_progress_is_silence_for_nobody(standstill):
    """Phases that come and go are progress: no report, however long it watches."""
    while not standstill.said.empty():
        standstill.said.get()
    with standstill.watchdog(silence_s=5.0) as watchdog:
        for _ in range(20):
            with standstill.phases("update"):
                watchdog._look()
    assert standstill.said.empty()


def test_the_actors_go_on_afterwards(standstill):
    assert standstill.buffer.run(ReplayBuffer.counts).leased == 2
    assert [a.run(RolloutWorker.stats)["in_flight"] for a in standstill.rollouts.actors.values()] == [2]
