"""A model that does not see scores no attempt with images, and a critic sees none."""

import pytest

from agentrl.chat.codec import find_image_tokens, load_tokenizer
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.controller.specs import check_critic
from agentrl.controller.teacher import check_teacher
from agentrl.errors import ConfigError, LearnerError
from agentrl.learner.packing import pack
from parts.learner import learner_spec, lone_learner, write_tiny_model
from parts.vision import sample_with_images, stored, write_seeing_model


@pytest.fixture
def seeing(tmp_path):
    return ModelConfig(path=str(write_seeing_model(tmp_path / "seeing")))


@pytest.fixture
def blind(tmp_path):
    write_tiny_model(tmp_path / "blind", 400)
    return ModelConfig(path=str(tmp_path / "blind"))


def test_they_are_refused_before_a_rank_starts(seeing, blind):
    with pytest.raises(
        ConfigError, match=r"distillation.teacher: model.path=.* does not see images, and the"
    ):
        check_teacher(blind, seeing, LearnerConfig())
    with pytest.raises(ConfigError, match=r"the policy .* sees images, and critics do not"):
        check_critic(blind, seeing, LearnerConfig())
    with pytest.raises(ConfigError, match=r"critic: .* sees images, which critics and reward models may not"):
        check_critic(seeing, blind, LearnerConfig())


def test_a_rank_that_gets_images_all_the_same_ends_with_one_line(seeing, blind, tmp_path):
    tokens = find_image_tokens(tmp_path / "seeing", load_tokenizer(tmp_path / "seeing"))
    one = sample_with_images(0, stored(tmp_path, (28, 28)), tokens)
    [[microbatch]] = pack([one], max_tokens=1000, world_size=1)
    with lone_learner(learner_spec(blind)) as learner, pytest.raises(LearnerError, match="does not see"):
        learner._policy.score_actions(microbatch, temperature=1.0)
