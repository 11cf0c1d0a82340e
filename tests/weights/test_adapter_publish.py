"""A LoRA adapter published alone: servers compute what merged weights compute, every token with its version,
or refuse all of it.
"""

import pytest
from pydantic import ValidationError

from agentrl.config.algorithm import AlgorithmConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.model import LoRAConfig, ModelConfig
from agentrl.config.rollout import EmbeddedServerConfig, SGLangServerConfig
from agentrl.config.schema import Config
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.learner.learner import LearnerSpec
from agentrl.servers.launch import SGLangServer
from agentrl.servers.supervisor import Supervisor
from parts.learner import lone_learner, update_once, write_tiny_model

VOCABULARY = 61
LORA = LoRAConfig(rank=3, alpha=6.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    write_tiny_model(folder / "base", VOCABULARY, max_position_embeddings=512, eos_token_id=VOCABULARY - 1)
    return folder


@pytest.fixture(scope="module")
def learner(folder):
    """A learner whose adapter has learned something; `train` makes one more update."""
    optimizer = OptimizerConfig(lr=1e-2)
    model = ModelConfig(path=str(folder / "base"), lora=LORA)
    spec = LearnerSpec(model, LearnerConfig(optimizer=optimizer), AlgorithmConfig(), "decoupled", 3, 1.0, 20)
    with lone_learner(spec) as one:
        update_once(one, VOCABULARY)
        yield one


def start(folder, log, **options):
    supervisor = Supervisor(
        EmbeddedServer(EmbeddedServerConfig(**options), "float32"),
        log_file=log,
        start_timeout_s=120,
        max_restarts=3,
    )
    return supervisor, supervisor.start(str(folder / "base"), "default")


# ----------------------------------------------------------------------------------------------------- config


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
