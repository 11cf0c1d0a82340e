"""`RewardKL`: the coefficient of KL in the reward, fixed or adapted after every batch.

Checkpoints store it.
"""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.algorithms.reward_kl import adapt_coefficient
from agentrl.config.algorithm import KLConfig
from agentrl.data.atomic_files import write_atomically
from agentrl.errors import CheckpointError

FILE = "reward_kl.json"


class RewardKL:
    """The coefficient, kept across steps."""

    def __init__(self, config: KLConfig) -> None:
        self.coefficient = config.coefficient
        self._config = config

    def observe(self, kl_sum: float, *, num_sequences: int, num_action_tokens: int) -> dict[str, float]:
        """Adapt the coefficient to a batch if the config has a target KL, and return the batch's metrics.

        Args:
            kl_sum: of the estimate on all action tokens, in nats.

        Returns:
            `reward_kl`, the mean per action token in nats, and `reward_kl_coefficient`, as used for this
            batch.
        """
        mean = kl_sum / max(num_action_tokens, 1)
        metrics = {"reward_kl": mean, "reward_kl_coefficient": self.coefficient}
        if self._config.target is not None:
            self.coefficient = adapt_coefficient(
                self.coefficient,
                mean,
                target=self._config.target,
                num_sequences=num_sequences,
                horizon=self._config.horizon,
            )
        return metrics

    def save(self, folder: Path) -> None:
        write_atomically(folder / FILE, json.dumps({"coefficient": self.coefficient}))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        try:
            self.coefficient = float(json.loads((folder / FILE).read_text())["coefficient"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{folder / FILE} could not be read: {error}; the checkpoint belongs to a run without KL in "
                "the reward"
            ) from error
