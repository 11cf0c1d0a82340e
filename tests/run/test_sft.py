"""The warm start is the same for the same seed, and is a policy that the rest can use."""

from safetensors.torch import load_file

from agentrl.config.compose import load_sft_config
from agentrl.controller.sft import supervise

SIZES = "{hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2}"


def test_same_seed_same_policy(world):
    def weights(name: str) -> dict:
        config = load_sft_config(
            "configs/quickstart_sft.yaml",
            [
                f"data.train_files=[{world.folder}/data/sft.parquet]",
                f"from_scratch.sizes={SIZES}",
                "trainer.steps=3",
                "trainer.batch_size=8",
                f"trainer.output={world.folder}/{name}",
                f"trainer.untrained_output={world.folder}/{name}_untrained",
            ],
        )
        return load_file(supervise(config) / "model.safetensors")

    first, second = weights("sft_a"), weights("sft_b")
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    untrained = load_file(world.folder / "sft_a_untrained/model.safetensors")
    assert any(not first[name].equal(untrained[name]) for name in first)
