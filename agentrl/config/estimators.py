"""`Estimator`: an estimator of advantages, and all that the program knows of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agentrl.registered import named

if TYPE_CHECKING:
    from agentrl.config.algorithm import AlgorithmConfig

GROUP = "agentrl.advantages"
"""Entry points: name -> `Estimator`, or a function alone."""

ESTIMATOR_KEYS = (
    "gamma",
    "lam",
    "bootstrap_truncated",
    "step_weight",
    "passk_k",
    "solved_reward",
    "singleton",
)
"""Keys of `algorithm` that only some estimators read."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator of advantages.

    name: the value of `algorithm.advantage`.
    function: `f(batch: ActionBatch, options: AdvantageOptions) -> Credit | RunCredit`, or its place as
    `module:function`, so that reading a config imports no torch.
    reads: what a batch must have besides rewards. `critic`: values of a critic; `greedy`: the reward of a
    greedy attempt per task; `columns`: every number per token that the learner has (values, KL).
    keys: those of ESTIMATOR_KEYS that it reads.
    compares: `group` if the attempts of a group are compared with each other.
    draws: the key of `algorithm` that says how many attempts of a group it draws.
    separate: a function like `function` (or its place) that looks at each trajectory alone, so that the ranks
    can compute it where their tokens are.
    is_whitened: `function` whitens over the batch what `separate` returns.
    steps: what it steps over, for `config explain`.
    """

    name: str
    function: str | Callable[..., Any]
    reads: frozenset[Literal["critic", "greedy", "columns"]] = frozenset({"columns"})
    keys: frozenset[str] = frozenset()
    compares: Literal["group"] | None = None
    draws: str | None = None
    separate: str | Callable[..., Any] | None = None
    is_whitened: bool = False
    steps: Literal["action tokens", "turns"] = "action tokens"

    @property
    def needs_whole_group(self) -> bool:
        """Whether one value per attempt is needed of every attempt of a group."""
        return "greedy" in self.reads or self.draws is not None

    def num_drawn(self, algorithm: AlgorithmConfig) -> int:
        """Return how many attempts of a group it draws; 1: any group will do."""
        return 1 if self.draws is None else int(getattr(algorithm, self.draws))


def estimator_named(name: str) -> Estimator:
    """Return the estimator that a package registers; for `file.py:NAME` a stand-in that names it.

    Raises:
        PluginError, ConfigError: see `agentrl.registered.named`.
    """
    if ":" in name:
        return Estimator(name, name)
    found = named("advantage estimator", name, group=GROUP)
    return found if isinstance(found, Estimator) else Estimator(name, found)
