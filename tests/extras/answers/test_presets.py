"""The rewards of known data sources are chosen without a setting."""

from agentrl.config.reward import RewardConfig
from agentrl.plugins import Reward, load_plugins
from agentrl.rewards.select import RewardTable
from parts.rollout_stage import make_task


def test_a_preset_is_loaded_when_a_task_needs_it():
    table = RewardTable(RewardConfig(), load_plugins())
    assert table.find(Reward) == []
    assert table.own(make_task(data_source="gsm8k")).name == "gsm8k"
    assert table.find(Reward) != []
