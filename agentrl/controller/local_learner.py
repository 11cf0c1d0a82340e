"""One learner rank in this process: the verbs of LearnerGroup that a step of learning needs, without Ray, for replay and for a debugger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from agentrl.config.schema import AlgorithmConfig, Config
from agentrl.learner.batch import Microbatch, ScoredMicrobatch
from agentrl.learner.counterfactual import Counterfactual
from agentrl.learner.learner import Learner, LearnerSpec

Scored = TypeVar("Scored")


class StepLearner(Protocol[Scored]):
    """What a step of learning needs of a learner: microbatches of each rank in, something scored out, and updates by it."""

    @property
    def parity_tokens(self) -> float: ...
    def score(self, shards: Sequence[list[Microbatch]]) -> Scored: ...
    def update(self, minibatch: Scored) -> dict[str, float]: ...


class ReplayLearner(StepLearner[Any], Protocol):
    """What a replay needs beside: to compare, to hash and write the weights, to save and load."""

    def compare(
        self, shards: Sequence[list[Microbatch]], reference: Sequence[list[Microbatch]], variants: Mapping[str, AlgorithmConfig]
    ) -> dict[str, Counterfactual]: ...
    def checksums(self) -> Mapping[str, str]: ...
    def export(self, folder: str) -> None: ...
    def save(self, folder: str) -> None: ...
    def load(self, folder: str) -> None: ...


class LocalLearner:
    """A Learner of one rank that takes the shards of a world of one.

    Raises:
        ConfigError: the model, device or attention cannot be had.
    """

    def __init__(self, spec: LearnerSpec) -> None:
        self.rank = Learner(spec, rank=0, address="127.0.0.1", port=0)
        self.parity_tokens = self.rank.parity_tokens()

    def score(self, shards: Sequence[list[Microbatch]]) -> list[ScoredMicrobatch]:
        [microbatches] = shards
        return self.rank.score(microbatches)

    def update(self, minibatch: list[ScoredMicrobatch]) -> dict[str, float]:
        return self.rank.update(minibatch)

    def compare(
        self, shards: Sequence[list[Microbatch]], reference: Sequence[list[Microbatch]], variants: Mapping[str, AlgorithmConfig]
    ) -> dict[str, Counterfactual]:
        [microbatches], [on_policy] = shards, reference
        return self.rank.compare(microbatches, on_policy, variants)

    def checksums(self) -> Mapping[str, str]:
        return self.rank.checksums()

    def export(self, folder: str) -> None:
        self.rank.export(folder)

    def save(self, folder: str) -> None:
        self.rank.save(folder)

    def load(self, folder: str) -> None:
        self.rank.load(folder)

    def stop(self) -> None:
        self.rank.close()


def learner_spec(config: Config, *, total_updates: int, dump_folder: str | None = None) -> LearnerSpec:
    """Return what a rank of this config is told; `auto` is a GPU where there is one."""
    return LearnerSpec(
        config.model,
        config.learner,
        config.algorithm_in_use,
        config.policy_mode,
        config.trainer.seed,
        config.rollout.temperature,
        total_updates,
        dump_folder,
    )
