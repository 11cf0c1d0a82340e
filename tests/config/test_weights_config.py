"""What of `rollout.weights` does not go together is refused before anything starts."""

import pytest
from pydantic import ValidationError

from agentrl.config.rollout import RolloutConfig, WeightsConfig


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
