"""`agentrl export` of a model that sees: its tower, which training leaves as it is, comes from the base."""

import shutil

import numpy as np
from typer.testing import CliRunner

from agentrl.chat.codec import find_image_tokens, load_tokenizer
from agentrl.cli.app import app
from agentrl.config.model import ModelConfig
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.saving import CheckpointWriter
from agentrl.learner.packing import pack
from parts.learner import learner_spec, lone_learner
from parts.vision import forward_of, sample_with_images, stored, write_seeing_model


def test_an_exported_checkpoint_sees_what_the_learner_saw(tmp_path):
    base = write_seeing_model(tmp_path / "base")
    tokens = find_image_tokens(base, load_tokenizer(base))
    refs = stored(tmp_path / "images", (84, 56), (30, 60))
    sample = sample_with_images(0, refs, tokens, has_stray=False)
    [shard] = pack([sample], max_tokens=1000, world_size=1)
    with lone_learner(learner_spec(ModelConfig(path=str(base)), temperature=1.0)) as learner:
        learner.update(learner.score(shard))
        writer = CheckpointWriter(tmp_path / "checkpoints", TrainerConfig())
        writer.save(learner, step=1, version=1, buffer_state=b"", metric=None)
        writer.finish()
        writer.close()
        [expected] = learner.own_logprobs(shard)
    moved = shutil.move(base, tmp_path / "moved")
    arguments = ["export", str(tmp_path / "checkpoints/step_000001"), str(tmp_path / "out")]
    assert f"{str(base)!r}" in str(CliRunner().invoke(app, arguments).exception)
    done = CliRunner().invoke(app, [*arguments, "--base", str(moved)])
    assert done.exit_code == 0, done.output
    logprobs = forward_of(tmp_path / "out")(sample.token_ids, sample.images)
    np.testing.assert_allclose(logprobs[np.flatnonzero(sample.action_mask) - 1], expected, atol=1e-5)
