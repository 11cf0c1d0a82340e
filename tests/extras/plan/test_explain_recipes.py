"""What is said of recipes, and of scores before updates."""

import pytest

from agentrl.config.schema import Config
from agentrl.extras.plan.explain import explain, find_warnings
from controller.test_recipes import RECIPES, config_of
from learner.test_scores_ahead import REASONS, score_reasons


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_explains_itself(recipe):
    config = config_of(recipe, "buffer.max_staleness=2", "rollout.group_size=4")
    text = explain(config)
    assert config.algorithm.policy_loss in text
    assert config.algorithm.aggregation in text
    assert not list(find_warnings(config))


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_to_score_ahead_is_explained(reason):
    config = Config(algorithm=REASONS[reason])
    [text] = score_reasons(config)
    assert text in " ".join(explain(config).split())


def test_without_a_reason_the_scores_come_with_the_update():
    assert "scored not before the update" in " ".join(explain(Config()).split())
