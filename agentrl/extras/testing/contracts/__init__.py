"""Contracts of plugins as pytest classes: subclass the contract of its kind, name the plugin, give examples.

from agentrl.extras.testing.contracts import ToolContract

class TestMyTool(ToolContract):
    tool = MyTool
    valid_calls = [{"x": 1}]

Each rule is one test, so a report shows which rule is broken.
"""

from agentrl.extras.testing.contracts.agents import AgentContract
from agentrl.extras.testing.contracts.environments import EnvironmentContract
from agentrl.extras.testing.contracts.interactions import InteractionContract
from agentrl.extras.testing.contracts.rewards import RewardContract, RewardExample
from agentrl.extras.testing.contracts.tools import ToolContract

__all__ = [
    "AgentContract",
    "EnvironmentContract",
    "InteractionContract",
    "RewardContract",
    "RewardExample",
    "ToolContract",
]
