"""A LoRA adapter published alone: servers compute what merged weights compute, every token with its version,
or refuse all of it.
"""

import pytest
from pydantic import ValidationError

from agentrl.config.model import LoRAConfig
from agentrl.config.rollout import SGLangServerConfig
from agentrl.config.schema import Config
from agentrl.servers.launch import SGLangServer

VOCABULARY = 61
LORA = LoRAConfig(rank=3, alpha=6.0)


def config_of(*, lora, path="/m", baselines=None, **rollout):
    return Config.model_validate(
        {
            "model": {"path": str(path), "lora": lora},
            "rollout": rollout,
            "tracking": {"baselines": baselines or {}},
        }
    )


def resolved(config):
    return config.with_adapter_resolved.rollout.weights.adapter


def test_auto_is_alone_where_an_adapter_travels_by_disk():
    assert resolved(config_of(lora={"rank": 4})) == "alone"
    assert resolved(config_of(lora={})) == "merged"
    assert resolved(config_of(lora={"rank": 4}, weights={"adapter": "merged"})) == "merged"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lora": {}}, "there is no adapter"),
        ({"weights": {"transport": "distributed"}}, "adapters are sent only by disk"),
        ({"backend": "sglang", "weights": {"pause_mode": "retract"}}, "pause_mode=retract"),
        ({"baselines": {"other": "/other"}}, "baselines"),
        ({"lora": {"rank": 4, "target_modules": ["q_proj", "lm_head"]}}, "lm_head"),
        ({"lora": {"rank": 512}}, "max_lora_rank=256 is below"),
        ({"backend": "sglang", "sglang": {"args": {"dp_size": 2}}}, "dp_size=2"),
        ({"backend": "sglang", "weights": {"verify": True}}, "reports none for adapters"),
        ({"backend": "sglang", "sglang": {"args": {"device": "cpu"}}}, "requires a GPU"),
    ],
)
def test_alone_is_refused_where_it_is_impossible(changes, why):
    changes = {"lora": {"rank": 4}, **changes}
    assert resolved(config_of(**changes)) == "merged"
    changes["weights"] = {**changes.get("weights", {}), "adapter": "alone"}
    with pytest.raises(
        ValidationError, match=f"rollout.weights.adapter=alone is impossible: .*{why}.*; use auto or merged"
    ):
        config_of(**changes)


def test_sglang_is_started_so_that_it_loads_the_adapter():
    words = SGLangServer(
        SGLangServerConfig(), "float32", lora=LoRAConfig(rank=4, target_modules=("q_proj", "v_proj"))
    ).command("/m", weight_version="0", host="127.0.0.1", port=1)
    text = " ".join(words)
    assert "--enable-lora --max-lora-rank 4 --lora-target-modules q_proj v_proj" in text
    assert "lora" not in " ".join(
        SGLangServer(SGLangServerConfig(), "float32").command("/m", weight_version="0", host="h", port=1)
    )
