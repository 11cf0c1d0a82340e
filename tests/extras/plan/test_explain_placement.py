"""A layout, as it is said before a run."""

from agentrl.config.placement import PlacementConfig
from agentrl.config.schema import Config
from agentrl.extras.plan.explain import placement_lines


def placement(pools, **roles):
    return PlacementConfig.model_validate({"pools": pools, "roles": roles})


def test_without_pools_everything_stands_anywhere_on_cpus():
    config = Config()
    layout = config.placement.layout(config.num_ranks)
    assert layout.reservations == {}
    assert {(spot.num_gpus, spot.bundle) for spots in layout.spots.values() for spot in spots} == {
        (0.0, None)
    }
    assert config.placement.device_of("actor") == "cpu"
    assert list(placement_lines(config.placement, config.num_ranks)) == [
        ("pool main", "no GPU: 1 x actor, 1 x servers")
    ]


def test_a_layout_is_explained_pool_by_pool():
    pools = {"learning": {"nodes": 2, "gpus_per_node": 2}, "serving": {"gpus_per_node": 2}}
    given = placement(pools, actor="learning", servers="serving")
    assert list(placement_lines(given, {"actor": 4, "critic": 4, "servers": 1})) == [
        ("pool learning", "2 nodes, 2 GPUs each: 4 x actor at 0.5 GPU, 4 x critic at 0.5 GPU"),
        ("pool serving", "1 node, 2 GPUs each: 1 x servers at 2 GPU"),
    ]
    assert (given.device_of("critic"), given.device_of("servers")) == ("cuda", "cuda")
