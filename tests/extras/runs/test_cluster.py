"""A training on a Ray of two nodes: everything stands where the pools say, and a node that is lost ends
nothing that stands elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow

PATIENCE_S = 400.0
"""Ends what hangs: a busy machine with few CPUs starts the processes of two nodes in minutes."""

OWN_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) % 2
"""


class Nodes:
    """Two nodes of Ray on this machine, `first` with the driver; each has its own address, and its own name
    as a resource.
    """

    def __init__(self) -> None:
        first = {"num_cpus": 1, "resources": {"first": 1}, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=first)
        self.first = self.cluster.head_node
        self.add_second()

    def add_second(self) -> None:
        self.second = self.cluster.add_node(num_cpus=1, resources={"second": 1}, node_ip_address="127.0.0.2")

    def lose_second(self) -> None:
        self.cluster.remove_node(self.second, allow_graceful=False)

    def roles(self) -> tuple[Counter[str], Counter[str]]:
        """Return what stands on each node: Ray's workers, and their children, descend from its raylet."""
        return _roles_below(self.first), _roles_below(self.second)


def _roles_below(node) -> Counter[str]:
    [raylet] = node.all_processes["raylet"]
    found: Counter[str] = Counter()
    for process in psutil.Process(raylet.process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            found.update(role for role, titles in TITLES.items() if any(title in words for title in titles))
    return found


TITLES = {
    "buffer": ("ray::BufferActor",),
    "rollout": ("ray::RolloutActor",),
    "server": ("agentrl.extras.embedded",),
    "rank": ("ray::WorkerHost", "ray::Learner"),  # during a call, Ray names a process after that
}


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setenv("AGENTRL_TEST_KEY", "of all nodes")  # of all processes that the nodes start
    nodes = Nodes()
    yield nodes
    nodes.cluster.shutdown()


def start(world, nodes: Nodes, name: str, *more: str):
    """Start a training on the nodes; return the command and the folder of the run."""
    run_dir = world.folder / name
    common = [
        f"trainer.run_dir={run_dir}",
        f"cluster.address={nodes.cluster.address}",
        "buffer.max_staleness=1",
        "rollout.num_actors=2",
    ]
    common += ["cluster.num_nodes=2", "trainer.steps=100_000", f"rollout.server_start_timeout_s={PATIENCE_S}"]
    return world.start(
        "train", str(world.config), *common, "rollout.api_key_env=AGENTRL_TEST_KEY", *more
    ), run_dir


def test_roles_of_a_run_stand_where_their_pools_are_and_the_users_files_reach_them(world, nodes, monkeypatch):
    """Paths are relative to the driver's folder, where the nodes were not started; the file of the reward is
    gone before they need it.
    """
    monkeypatch.chdir(world.folder)
    own = Path("own_reward.py")
    own.write_text(OWN_REWARD)
    run, run_dir = start(
        world,
        nodes,
        "two_nodes",
        "learner.world_size=2",
        "placement.pools={both: {nodes: 2}, serving: {node_resource: second}}",
        "placement.roles={actor: both, servers: serving}",
        "reward.custom_function.path=own_reward.py",
        "data.train_files=[data/train.parquet]",
        "trainer.run_dir=two_nodes",
    )
    run.wait_until(lambda: "2 node(s), 2 CPUs, 0 GPUs" in run.output(), PATIENCE_S)
    own.unlink()
    run.wait_until(lambda: world.num_steps(run_dir) >= 2, PATIENCE_S)
    first, second = nodes.roles()
    assert first.pop("rollout", 0) + second.pop("rollout", 0) == 2  # where Ray has room
    assert (first, second) == ({"buffer": 1, "rank": 1}, {"server": 1, "rank": 1})
    assert any(0 < record["rollout/reward_mean"] < 1 for record in world.records(run_dir).train)
    run.interrupt()
    assert run.wait(PATIENCE_S) == 130, run.output()
    assert run.left_behind() == []


def test_a_run_goes_on_without_a_node_and_takes_it_back(world, nodes):
    """Rollout actors of the node are replaced on the other one, its server once the node is there again."""
    run, run_dir = start(
        world,
        nodes,
        "node_lost",
        "rollout.num_servers=2",
        "placement.pools={learning: {node_resource: first}, serving: {nodes: 2}}",
        "placement.roles={actor: learning, servers: serving}",
    )
    run.wait_until(lambda: world.num_steps(run_dir) >= 2, PATIENCE_S)
    _, lost = nodes.roles()
    assert lost["server"] == 1
    nodes.lose_second()
    run.wait_until(lambda: run.output().count("takes over") == lost["rollout"], PATIENCE_S)
    run.wait_until(lambda: "starting server_2 to replace it" in run.output(), PATIENCE_S)
    steps = world.num_steps(run_dir)
    run.wait_until(lambda: world.num_steps(run_dir) > steps + 2, PATIENCE_S)
    nodes.add_second()
    run.wait_until(lambda: "joined and gets version" in run.output(), PATIENCE_S)
    assert nodes.roles()[1]["server"] == 1
    steps = world.num_steps(run_dir)
    run.wait_until(lambda: world.num_steps(run_dir) > steps + 2, PATIENCE_S)
    assert all(record["rollout/lag/max"] <= 1 for record in world.records(run_dir).train)
    run.interrupt()
    assert run.wait(PATIENCE_S) == 130, run.output()
    assert run.left_behind() == []
    audit = world.start("audit", str(run_dir))
    assert audit.wait(PATIENCE_S) == 0, audit.output()


def test_a_run_that_lost_a_node_with_a_learner_rank_goes_on_from_its_checkpoint_when_the_node_is_back(
    world, nodes
):
    """The rank that is left is ended, and both start again: the lost one waits for its seat."""
    run, run_dir = start(
        world,
        nodes,
        "rank_lost_with_its_node",
        "learner.world_size=2",
        "placement.pools={both: {nodes: 2}, serving: {node_resource: first}}",
        "placement.roles={actor: both, servers: serving}",
        "trainer.save_freq=2",
    )
    run.wait_until(lambda: any((run_dir / "checkpoints").glob("step_*")), PATIENCE_S)
    assert nodes.roles()[1]["rank"] == 1
    nodes.lose_second()
    run.wait_until(lambda: "restarting all ranks from step_" in run.output(), PATIENCE_S)
    assert re.search(r"learner rank \d was lost", run.output())  # either may stand there
    nodes.add_second()
    steps = world.num_steps(run_dir)
    run.wait_until(lambda: world.num_steps(run_dir) > steps + 2, PATIENCE_S)
    assert nodes.roles()[1]["rank"] == 1
    run.interrupt()
    assert run.wait(PATIENCE_S) == 130, run.output()
    assert run.left_behind() == []
    audit = world.start("audit", str(run_dir))
    assert audit.wait(PATIENCE_S) == 0, audit.output()
