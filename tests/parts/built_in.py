"""What this package registers, by name: functions of losses and estimators."""

from agentrl.algorithms.registry import find_estimator, find_loss
from agentrl.config.estimators import GROUP as ADVANTAGES
from agentrl.config.losses import GROUP as LOSSES
from agentrl.config.model import TOOL_FORMATS as FORMATS
from agentrl.registered import names_of_ours

ESTIMATORS = {name: find_estimator(name).function for name in names_of_ours(ADVANTAGES)}
TOOL_FORMATS = names_of_ours(FORMATS)
POLICY_LOSSES = {name: find_loss(name).function for name in names_of_ours(LOSSES)}
