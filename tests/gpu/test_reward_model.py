"""A reward model on the device, against transformers in float64."""

from contextlib import closing

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from agentrl.config.model import ModelConfig
from agentrl.config.reward_model import RewardModelConfig
from agentrl.learner.packing import pack
from agentrl.learner.ranks import leave_ranks
from agentrl.learner.reward_model import RewardModel
from parts.gpu import DEVICE, FLOORS, SIZES, VOCABULARY, distance, random_lengths, samples_of, sized
from parts.learner import reserved_port, tiny_sizes

SAMPLES = samples_of(random_lengths(sized(3000, 120)))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    sizes = tiny_sizes(VOCABULARY, **SIZES, initializer_range=sized(0.06, 0.2), max_position_embeddings=8192)
    Qwen2ForSequenceClassification(Qwen2Config(**sizes, num_labels=1, pad_token_id=0)).save_pretrained(folder)
    return folder


def scores(folder, *, device=DEVICE, dtype="float32", offload="none"):
    config = RewardModelConfig(
        model=ModelConfig(path=str(folder), dtype=dtype), offload=offload, microbatch_tokens=512
    )
    try:
        with closing(RewardModel(config, device, rank=0, address="127.0.0.1", port=reserved_port())) as model:
            [shard] = pack(SAMPLES, max_tokens=512, world_size=1, may_split=False)
            order = np.concatenate([microbatch.sample_indices for microbatch in shard])
            values = np.concatenate(model.score(shard)).astype(np.float64)
    finally:
        if torch.distributed.is_initialized():
            leave_ranks()
    return torch.from_numpy(values[np.argsort(order)])


@torch.no_grad()
def plain_scores(folder):
    """Each conversation alone, by transformers."""
    model = Qwen2ForSequenceClassification.from_pretrained(folder, dtype=torch.float64)
    head, base = model.score, model.model
    ids = [torch.tensor(sample.token_ids[None]) for sample in SAMPLES]
    return torch.stack([head(base(input_ids=row).last_hidden_state[0, -1])[0] for row in ids])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_those_of_each_conversation_alone(classifier, measured, dtype):
    expected = plain_scores(classifier)
    of_cpu = distance(scores(classifier, device="cpu", dtype=dtype), expected)
    for offload in ("none", "parameters"):
        measured[offload] = distance(scores(classifier, dtype=dtype, offload=offload), expected)
        assert measured[offload] <= 3 * of_cpu + FLOORS[dtype], offload
    assert of_cpu < 0.1
