"""What every plugin keeps to, as pytest classes: subclass the one of its kind, name the plugin, give examples.

from agentrl.testing.contracts import ToolContract

class TestMyTool(ToolContract):
    tool = MyTool
    valid_calls = [{"x": 1}]

Each law is one test, so that a report says which one is broken.
"""

from agentrl.testing.contracts.agents import AgentContract
from agentrl.testing.contracts.interactions import InteractionContract
from agentrl.testing.contracts.rewards import RewardContract, RewardExample
from agentrl.testing.contracts.tools import ToolContract

__all__ = ["AgentContract", "InteractionContract", "RewardContract", "RewardExample", "ToolContract"]
