"""Supervised runs: the same for the same seed, stopped and resumed as uninterrupted, and models that the rest
can use.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from agentrl.chat.chat import Chat
from agentrl.extras.supervised.config import load_sft_config
from agentrl.config.model import ModelConfig
from agentrl.data.folder_index import INDEX
from agentrl.data.model_source import resolve_model
from agentrl.errors import ConfigError
from agentrl.extras.storage.fetched import fetched_folder
from agentrl.extras.storage.storage import StoragePath
from agentrl.extras.supervised.train import supervise

SIZES = (
    "{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 2}"
)


pytestmark = pytest.mark.usefixtures("one_ray")


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    policy: Path

    @property
    def weights(self):
        return load_file(self.policy / "model.safetensors")

    def metrics(self, kind, name):
        lines = (self.policy.with_name(f"{self.policy.name}_run") / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record[name] for record in map(json.loads, lines) if record["kind"] == kind}


def supervised(world, name, *changes):
    overrides = [
        f"data.train_files=[{world.folder}/data/sft.parquet]",
        f"from_scratch.sizes={SIZES}",
        "trainer.steps=6",
        "trainer.batch_size=8",
        f"trainer.output={world.folder}/{name}",
        f"trainer.untrained_output={world.folder}/{name}_untrained",
    ]
    return Run(supervise(load_sft_config("configs/quickstart_sft.yaml", [*overrides, *changes])))


def is_same(weights, others):
    return weights.keys() == others.keys() and all(weights[name].equal(others[name]) for name in weights)


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_been(world):
    """The whole run and the two halves have the same seed: their first updates are those of the same run made
    twice.
    """
    options = [
        "learner.optimizer.schedule=constant",
        "trainer.save_freq=2",
        f"data.val_files=[{world.folder}/data/sft.parquet]",
    ]
    options += ["trainer.test_freq=3"]
    whole = supervised(world, "whole", *options)
    supervised(world, "halves", *options, "trainer.steps=4")
    halves = supervised(world, "halves", *options)  # 4 updates are made, 2 are left
    assert is_same(halves.weights, whole.weights)
    assert not is_same(whole.weights, load_file(world.folder / "whole_untrained/model.safetensors"))
    for kind, name in (("train", "sft/loss"), ("train", "sft/lr"), ("validation", "val/loss")):
        assert halves.metrics(kind, name) | {4: None} == whole.metrics(kind, name) | {4: None}
    assert list(whole.metrics("validation", "val/loss")) == [3, 6]
    assert whole.metrics("validation", "val/perplexity")[6] == pytest.approx(
        np.exp(whole.metrics("validation", "val/loss")[6])
    )
    kept = sorted(folder.name for folder in (world.folder / "whole_run/checkpoints").iterdir())
    assert kept == ["step_000002", "step_000004", "step_000006"]
    with pytest.raises(ConfigError, match=r"was written with other training rows, batch size or seed"):
        supervised(world, "whole", *options, "trainer.seed=1")
    supervised(world, "whole", *options, "trainer.seed=1", "trainer.resume_mode=disable", "trainer.steps=1")
    assert {path.parent.name for path in (world.folder / "whole_run/checkpoints").rglob("step_*")} == {
        "checkpoints",
        "before_000",
    }


def test_the_model_goes_to_object_storage_and_its_run_stays(world, s3):
    url = f"{s3.url}/policy"
    places = [f"trainer.output={url}", f"trainer.run_dir={world.folder}/sent_run"]
    supervised(world, "sent", "trainer.steps=1", "trainer.save_freq=1", *places)
    sent = fetched_folder(url)
    assert not is_same(
        load_file(sent / "model.safetensors"), load_file(world.folder / "sent_untrained/model.safetensors")
    )
    names = {INDEX, *(file.name for file in sent.iterdir())}
    assert StoragePath.of(s3.url).files().keys() == {f"policy/{name}" for name in names}
    assert Chat.of(resolve_model(ModelConfig(path=url))).eos_token_ids
    assert (world.folder / "sent_run/checkpoints/step_000001").is_dir()


@pytest.mark.slow
def test_the_best_policy_is_that_of_the_lowest_validation_loss(world):
    """The learning rate is so large that the loss rises in the end."""
    options = [
        f"data.val_files=[{world.folder}/data/sft.parquet]",
        "trainer.test_freq=1",
        "learner.optimizer.lr=0.3",
        "trainer.steps=4",
    ]
    options += ["learner.optimizer.warmup_updates=3", "learner.optimizer.schedule=constant"]
    best = supervised(world, "best", *options, "trainer.export=best")
    losses = best.metrics("validation", "val/loss")
    step = min(losses, key=losses.__getitem__)
    assert step < 4
    upto = supervised(world, "upto", *options, f"trainer.steps={step}")
    assert is_same(best.weights, upto.weights)
