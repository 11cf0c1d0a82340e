"""One optimizer update: forward and backward over all microbatches; then all ranks step or skip together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from agentrl.algorithms.aggregation import UpdateCounts
from agentrl.config.learner import OptimizerConfig
from agentrl.heap import GapLimit
from agentrl.learner.batch import Microbatch, ScoredMicrobatch
from agentrl.learner.loss_part import LossPart, finish_metrics
from agentrl.learner.model import Policy
from agentrl.learner.optimizer import (
    build_optimizer,
    clip_gradients,
    gradient_norm,
    learning_rate,
    move_state,
    set_learning_rate,
    state_at_hand,
)
from agentrl.learner.ranks import RankPlace, add_over_ranks, largest_over_ranks

Item = Microbatch | ScoredMicrobatch


def count_update(items: Sequence[Item]) -> UpdateCounts:
    """Count loss tokens, action tokens and sequences over the microbatches of ALL ranks. A collective."""
    local = {
        "loss_tokens": sum(item.num_loss_tokens for item in items),
        "action_tokens": sum(item.num_action_tokens for item in items),
        "sequences": sum(item.num_sequences for item in items),
    }
    counts = add_over_ranks(local)
    return UpdateCounts(int(counts["loss_tokens"]), int(counts["sequences"]), int(counts["action_tokens"]))


class Stepper:
    """The optimizer of one rank's shards, and the counts of updates and of non-finite updates.

    before_change: called before each change of weights and optimizer state.
    """

    def __init__(
        self,
        policy: Policy,
        place: RankPlace,
        config: OptimizerConfig,
        *,
        total_updates: int,
        dump_folder: str | None,
        before_change: Callable[[], None],
        is_offloaded: bool,
    ) -> None:
        self.optimizer = build_optimizer(policy.module, config)
        self.num_updates = 0
        self.num_non_finite = 0
        self._policy = policy
        self._place = place
        self._config = config
        self._total_updates = total_updates
        self._dump_folder = dump_folder
        self._before_change = before_change
        self._is_offloaded = is_offloaded
        self._gaps = GapLimit()

    def run(
        self, items: Sequence[Item], part_of: Callable[[int], LossPart], counts: UpdateCounts
    ) -> dict[str, float]:
        """Make one update over `items` and return the global metrics. A collective.

        `part_of(index)` computes the loss part of an item. If there is nothing to learn on any rank, or a
        loss or gradient is not finite, no weight changes on any rank. The learning rate schedule advances in
        every case.
        """
        lr = learning_rate(self.num_updates, self._config, total_updates=self._total_updates)
        self.num_updates += 1
        facts = {"lr": lr, "num_tokens": float(counts.loss_tokens), "num_sequences": float(counts.sequences)}
        if counts.loss_tokens == 0:
            return {**facts, "is_skipped": 1.0, "non_finite_updates": float(self.num_non_finite)}
        sums: dict[str, Tensor] = {}
        maxima: dict[str, Tensor] = {}
        routing = self._policy.routing
        routing.begin_update(sum(_microbatch(item).num_tokens for item in items))
        for index in range(len(items)):
            part = part_of(index)
            loss = part.loss + routing.part()
            # FSDP averages gradients over ranks. The scales in the loss already contain the global counts, so
            # the gradients must be summed: undo the division.
            (loss * self._place.mesh.size()).backward()
            _add(part, sums, maxima)
        del part, loss  # their graph would stay in memory during the optimizer's step
        norm = gradient_norm(self._policy.module.parameters())
        is_finite = self._all_finite(float(sums["loss"]), float(norm))
        if is_finite:
            clip_gradients(self._policy.module.parameters(), norm, self._config.grad_clip)
            set_learning_rate(self.optimizer, lr)
            self._before_change()
            with state_at_hand(self.optimizer, self._place.device, is_offloaded=self._is_offloaded):
                self.optimizer.step()
        else:
            self.num_non_finite += 1
            self._dump(items)
        self.optimizer.zero_grad(set_to_none=True)
        if self._place.device.type == "cpu":
            self._gaps.check()
        metrics = finish_metrics(
            add_over_ranks(_floats(sums)), largest_over_ranks(_floats(maxima)), num_tokens=counts.loss_tokens
        )
        metrics |= routing.finish_update()
        metrics |= {
            "grad_norm": float(norm),
            "is_skipped": float(not is_finite),
            "non_finite_updates": float(self.num_non_finite),
        }
        return facts | {name: value for name, value in metrics.items() if math.isfinite(value)}

    def put_state_away(self) -> None:
        """Move the optimizer's state to the CPU if it is offloaded; a loaded state is on the device."""
        if self._is_offloaded:
            move_state(self.optimizer, torch.device("cpu"))

    def _all_finite(self, loss: float, norm: float) -> bool:
        # The norm is global, but the loss is this rank's own. Without agreement one rank would skip the step
        # while the others take it.
        is_bad = not (math.isfinite(loss) and math.isfinite(norm))
        return largest_over_ranks({"is_bad": float(is_bad)})["is_bad"] == 0.0

    def _dump(self, items: Sequence[Item]) -> None:
        if self._dump_folder is None:
            return
        folder = Path(self._dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        arrays = {
            f"{index}.{name}": column
            for index, item in enumerate(items)
            for name, column in _columns(item).items()
        }
        save_file(
            arrays, str(folder / f"update{self.num_updates - 1:06d}_rank{self._place.rank}.safetensors")
        )


def _add(part: LossPart, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
    for name, value in part.sums.items():
        sums[name] = sums.get(name, 0.0) + value.detach().double()
    for name, value in part.maxima.items():
        maxima[name] = torch.maximum(maxima[name], value) if name in maxima else value


def _microbatch(item: Item) -> Microbatch:
    return item.microbatch if isinstance(item, ScoredMicrobatch) else item


def _floats(values: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _columns(item: Item) -> Mapping[str, np.ndarray]:
    microbatch = _microbatch(item)
    columns = {field.name: getattr(microbatch, field.name) for field in fields(microbatch)}
    if isinstance(item, ScoredMicrobatch):
        columns |= {"proximal_logprobs": item.proximal_logprobs, "ref_logprobs": item.ref_logprobs}
        columns |= {"accepted": item.correction.accepted, "weights": item.correction.weights}
    return {name: np.ascontiguousarray(column) for name, column in columns.items() if column is not None}
