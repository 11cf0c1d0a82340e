"""Pools: where ranks stand, what is impossible, and that a Ray of several nodes puts them where the config
says.
"""

import sys
from collections import Counter

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from ray.cluster_utils import Cluster

from agentrl.cluster.deadlines import CallDeadlines
from agentrl.cluster.group import WorkerGroup
from agentrl.cluster.pools import reserve
from agentrl.cluster.seats import reserve_seats
from agentrl.config.placement import PlacementConfig
from agentrl.config.schema import Config
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.learner.dispatch import dispatch


def placement(pools, **roles):
    return PlacementConfig.model_validate({"pools": pools, "roles": roles})


@given(
    nodes=st.integers(1, 4),
    gpus_per_node=st.integers(1, 8),
    shares=st.dictionaries(
        st.sampled_from(["critic", "reward_model", "servers"]), st.integers(1, 32), max_size=3
    ),
)
def test_ranks_of_a_role_stand_on_gpus_of_their_own_and_no_gpu_is_given_away_twice(
    nodes, gpus_per_node, shares
):
    num_gpus = nodes * gpus_per_node
    ranks = {"actor": num_gpus} | {role: min(count, num_gpus) for role, count in shares.items()}
    layout = placement({"gpu": {"nodes": nodes, "gpus_per_node": gpus_per_node}}).layout(ranks)
    [reservation] = layout.reservations.values()
    assert [len(group) for group in reservation.groups] == [gpus_per_node] * nodes
    taken = Counter()
    for role, spots in layout.spots.items():
        places = [(spot.group, spot.bundle) for spot in spots]
        assert len(places) == len(set(places)) == ranks[role]
        assert places == sorted(places)  # neighbouring ranks are on one node
        for spot in spots:
            taken[spot.group, spot.bundle] += spot.num_gpus
    assert all(0.99 < amount <= 1 for amount in taken.values())
    assert len(taken) == num_gpus


def test_servers_alone_in_a_pool_share_all_of_it():
    two_each = placement({"gpu": {"nodes": 2, "gpus_per_node": 4}}).layout({"servers": 4})
    assert [(s.num_gpus, s.group, s.bundle) for s in two_each.spots["servers"]] == [
        (2, 0, 0),
        (2, 0, 1),
        (2, 1, 0),
        (2, 1, 1),
    ]
    assert two_each.reservations["gpu"].groups == (({"GPU": 2.0},) * 2,) * 2
    halves = placement({"gpu": {"gpus_per_node": 2}}).layout({"servers": 4})
    assert [(s.num_gpus, s.bundle) for s in halves.spots["servers"]] == [
        (0.5, 0),
        (0.5, 1),
        (0.5, 0),
        (0.5, 1),
    ]


def test_servers_of_frozen_models_stand_with_the_policys_or_in_a_pool_of_their_own():
    pools = {"gpu": {"gpus_per_node": 4}}
    shared = placement(pools).layout({"servers": 4, "frozen_servers": 2})
    assert [spot.num_gpus for spot in shared.spots["servers"]] == [0.5, 0.5, 1, 1]
    assert [(spot.num_gpus, spot.bundle) for spot in shared.spots["frozen_servers"]] == [(0.5, 0), (0.5, 1)]
    apart = placement({**pools, "old": {"gpus_per_node": 4}}, servers="gpu", frozen_servers="old")
    spots = apart.layout({"servers": 4, "frozen_servers": 2}).spots["frozen_servers"]
    assert [(spot.pool, spot.num_gpus) for spot in spots] == [("old", 2)] * 2
    with pytest.raises(ValueError, match="change the num_servers of opponents or teacher"):
        apart.layout({"servers": 4, "frozen_servers": 3})


def test_ranks_without_gpus_are_spread_over_the_nodes_of_their_pool():
    layout = placement({"cpu": {"nodes": 2, "node_resource": "big_memory"}}).layout({"actor": 4})
    assert [spot.bundle for spot in layout.spots["actor"]] == [0, 0, 1, 1]
    assert layout.reservations["cpu"].strategy == "STRICT_SPREAD"
    assert layout.reservations["cpu"].groups == (({"big_memory": 0.001},) * 2,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pools": {"a": {"device": "cuda"}}}, r"device=cuda, but gpus_per_node=0; set gpus_per_node"),
        (
            {"pools": {"a": {"device": "cpu", "gpus_per_node": 2}}},
            r"device=cpu would leave gpus_per_node=2 unused",
        ),
        ({"pools": {"a": {}}, "roles": {"actor": "b"}}, r"roles\.actor=b is not a pool; available: a"),
        (
            {"pools": {"a": {}, "b": {}}, "roles": {"actor": "a"}},
            r"placement\.roles\.servers names no pool; choose one of a, b",
        ),
        (
            {"pools": {"a": {}, "b": {}}, "roles": {"actor": "a", "servers": "a"}},
            r"placement\.pools\.b is used by no role",
        ),
        (
            {"pools": {"a": {"gpus_per_node": 1}}},
            r"placement\.pools\.a \(1 node x 1 GPU\): 2 ranks of actor need one GPU each",
        ),
        (
            {"pools": {"a": {"gpus_per_node": 4}}},
            r"its largest role, servers, uses 3 of them; the other GPUs would be idle",
        ),
        (
            {
                "pools": {"a": {"gpus_per_node": 2}, "b": {"gpus_per_node": 8}},
                "roles": {"actor": "a", "servers": "b"},
            },
            r"placement\.pools\.b \(1 node x 8 GPUs\): 3 servers cannot get the same number of GPUs of one "
            r"node",
        ),
        (
            {"pools": {"a": {"gpus_per_node": 2}}},
            r"3 servers cannot share its GPUs evenly; change rollout.num_servers",
        ),
        (
            {"pools": {"a": {"nodes": 2}}},
            r"placement\.pools\.a\.nodes=2, but a Ray started on this machine has one node; set "
            r"cluster\.address",
        ),
    ],
)
def test_what_is_impossible_is_refused_before_ray_starts(values, message):
    with pytest.raises(ValidationError, match=message):
        Config.model_validate(
            {"placement": values, "learner": {"world_size": 2}, "rollout": {"num_servers": 3}}
        )


# ------------------------------------------------------------------------------------------- two nodes of Ray


class Standing:
    """A worker that tells where it stands. GPUs are resources of Ray here: no rank looks at a device."""

    def __init__(self, *, rank, address, port): ...

    @dispatch("all", join="concat")
    def place(self):
        context = ray.get_runtime_context()
        node = next(n for n in ray.nodes() if n["NodeID"] == context.get_node_id())
        return [(node["Resources"].get("big_memory", 0.0) > 0, tuple(context.get_accelerator_ids()["GPU"]))]


@pytest.fixture(scope="module")
def two_nodes():
    """One node with two GPUs, one with two GPUs and the resource `big_memory`; a Ray of their own, whatever
    else runs here.
    """
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1, num_gpus=2, resources={"big_memory": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks cannot import this file
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()
    cluster.shutdown()


def test_roles_stand_where_their_pools_are(two_nodes):
    pools = {
        "learning": {"gpus_per_node": 2, "node_resource": "big_memory"},
        "serving": {"gpus_per_node": 2},
        "cpu": {"nodes": 2},
    }
    given = placement(pools, actor="learning", reward_model="learning", servers="serving", critic="cpu")
    groups = []
    with reserve_seats(given, {"actor": 2, "reward_model": 1, "servers": 1, "critic": 2}) as seats:
        try:
            for role in ("actor", "reward_model", "servers", "critic"):
                groups.append(WorkerGroup.start(Standing, seats=seats[role], deadlines=CallDeadlines(120.0)))
            actor, reward_model, servers, critic = (group.run(Standing.place) for group in groups)
        finally:
            for group in groups:
                group.stop()
        assert [is_big for is_big, _ in actor] == [True, True]
        assert len({gpus for _, gpus in actor}) == 2
        assert reward_model == actor[:1]  # the same node, and the same half of a GPU
        assert [(is_big, len(gpus)) for is_big, gpus in servers] == [(False, 2)]
        assert sorted(critic) == [(False, ()), (True, ())]
        with pytest.raises(
            InfrastructureError,
            match=r"pools\.late waited 0\.1 s for 1 node\(s\) with 1 GPUs: other jobs use",
        ):
            with reserve(
                placement({"late": {"gpus_per_node": 1}}).layout({"actor": 1}).reservations, timeout_s=0.1
            ):
                pass


@pytest.mark.parametrize(
    ("pools", "roles", "ranks", "message"),
    [
        (
            {"a": {"gpus_per_node": 3}},
            {},
            {"actor": 3},
            r"^placement\.pools\.a needs 1 node\(s\) with 3 GPUs; .* have 2, 2 GPUs$",
        ),
        (
            {"a": {"nodes": 3, "gpus_per_node": 2}},
            {},
            {"actor": 6},
            r"pools\.a needs 3 node\(s\) with 2 GPUs",
        ),
        (
            {"a": {"nodes": 2, "node_resource": "big_memory"}},
            {},
            {"actor": 2},
            r"pools\.a needs 2 node\(s\) with the resource big_memory",
        ),
        (
            {"a": {"nodes": 2, "gpus_per_node": 2}, "b": {"gpus_per_node": 1}},
            {"actor": "a", "servers": "b"},
            {"actor": 4, "servers": 1},
            r"pools a, b need 5 GPUs in total",
        ),
    ],
)
def test_what_the_cluster_can_never_hold_is_refused_at_once(two_nodes, pools, roles, ranks, message):
    with pytest.raises(ConfigError, match=message), reserve_seats(placement(pools, **roles), ranks):
        pass
