"""A run with a mixture of experts, divided over two ranks: servers compute what the learner computes."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import agentrl
from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from parts.learner import tiny_sizes


@pytest.fixture
def experts(world):
    """Write a tiny Qwen3-MoE of four experts with the run's tokenizer."""
    folder = world.folder / "experts"
    write_tiny_tokenizer(folder)
    config = Qwen3MoeConfig(
        **tiny_sizes(Chat.load(str(folder)).vocab_size, initializer_range=0.02),
        moe_intermediate_size=24,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_run_divides_experts_over_its_ranks(world, experts):
    run_dir = world.folder / "divided"
    config = agentrl.load_config(
        str(world.config),
        [
            f"model.path={experts}",
            f"trainer.run_dir={run_dir}",
            "trainer.steps=3",
            "learner.world_size=2",
            "learner.expert_parallel=2",
            "learner.balance_coefficient=0.01",
            "learner.optimizer.lr=0.02",
            # a random model earns no reward: this is what it learns from
            "algorithm.entropy_coefficient=1.0",
            "buffer.max_staleness=0",
            "rollout.replay_experts=true",
            "rollout.weights.verify=true",
        ],
    )
    result = agentrl.train(config)

    assert result.step == 3
    assert result.counts.is_balanced
    records = world.records(run_dir).train
    # From the second step on the servers sample with trained experts.
    assert all(record["learner/mismatch_max"] < 1e-4 for record in records)
    # All but the last token of each attempt were recorded.
    assert all(0.9 < record["learner/router/replayed"] < 1 for record in records)
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (experts, result.model_path))
    for layer, trained in zip(before.model.layers, after.model.layers, strict=True):
        for own, other in zip(layer.mlp.experts.parameters(), trained.mlp.experts.parameters(), strict=True):
            assert bool((own != other).flatten(1).any(dim=1).all()), "an expert did not learn"
