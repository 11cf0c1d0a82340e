"""What of `rollout.weights` does not go together is refused before anything starts."""

import pytest
from pydantic import ValidationError

from agentrl.config.rollout import RolloutConfig, WeightsConfig
from agentrl.config.schema import Config


def test_deltas_travel_by_disk_alone():
    assert WeightsConfig(delta=True).transport == "disk"
    for transport in ("distributed", "tensor"):
        with pytest.raises(ValidationError, match=f"delta=true, transport={transport}"):
            WeightsConfig(delta=True, transport=transport)


def test_pickles_are_not_for_the_embedded_server():
    weights = WeightsConfig(transport="tensor")
    assert RolloutConfig(backend="sglang", weights=weights).weights.transport == "tensor"
    with pytest.raises(ValidationError, match="accepts no pickled tensors; use disk or distributed"):
        RolloutConfig(backend="embedded", weights=weights)


def test_only_process_groups_have_several_sources():
    assert WeightsConfig(transport="distributed", sources=2).sources == 2
    with pytest.raises(ValidationError, match=r"sources=2, transport=disk: .*use transport=distributed"):
        WeightsConfig(sources=2)


@pytest.mark.parametrize(
    ("learner", "named"),
    [
        ({"world_size": 2}, "world_size=2"),
        ({"world_size": 4, "fsdp": {"shard_size": 2}}, "fsdp.shard_size=2"),
    ],
    ids=str,
)
def test_sources_are_ranks_of_one_copy_of_the_model(learner, named):
    weights = {"transport": "distributed"}
    Config.model_validate({"learner": learner, "rollout": {"weights": weights | {"sources": 2}}})
    with pytest.raises(ValidationError, match=rf"sources=3 is more than learner\.{named}.*use at most 2"):
        Config.model_validate({"learner": learner, "rollout": {"weights": weights | {"sources": 3}}})
