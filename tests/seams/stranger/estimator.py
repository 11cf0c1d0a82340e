"""An estimator that knows only whether an attempt was better or worse than its group."""

import torch

from agentrl.algorithms.advantages.groups import Groups
from agentrl.algorithms.compact import ActionBatch, AdvantageOptions, RunCredit
from agentrl.config.estimators import Estimator


def better(batch: ActionBatch, options: AdvantageOptions) -> RunCredit:
    """Return the sign of R_i - mean_G."""
    return RunCredit(torch.sign(torch.from_numpy(Groups.of(batch).deviations)), batch.num_tokens_N)


ESTIMATOR = Estimator("better", better, reads=frozenset(), compares="group")
