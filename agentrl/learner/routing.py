"""Routing of a policy with experts: replayed as the servers did it, balanced by a loss, and measured.

*Replay.* A server and the learner round differently. Where two experts are almost equally good, each may
choose another one, and the log-probability of a token then differs by far more than rounding. With the
experts that the server has recorded, the learner computes the same function; by how much each expert counts
is still computed here, with gradient. Source: Ma et al. 2025, arXiv:2510.11370.

*Balance.* The sequence-wise balance loss, on softmax probabilities: with T tokens of a segment, E experts and
K of them per token, the mean over layers of

    sum_e f_e P_e,  f_e = E / (K T) * (tokens of the segment that go to e),  P_e = mean probability of e,

weighted by the segment's share of the update's tokens. It is 1 if all experts get equally much. Source:
DeepSeek-AI 2024 (DeepSeek-V3), arXiv:2412.19437, equations 17 to 20. A loss over whole microbatches would
depend on how the batch is packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from agentrl.errors import LearnerError
from agentrl.learner.forward_input import ForwardInput
from agentrl.learner.ranks import add_over_ranks, sum_over_ranks
from agentrl.servers.expert_routers import ExpertRouter, as_table

NOT_RECORDED = -1
"""In place of an expert: nobody has recorded which experts computed the token."""


class Routing:
    """Directs and watches the routers of one model. Without routers it does nothing.

    Call it before the model is sharded: it registers hooks.
    """

    def __init__(
        self,
        routers: Sequence[ExpertRouter] = (),
        *,
        num_layers: int = 0,
        replays: bool = False,
        balance: float = 0.0,
    ) -> None:
        """`replays`: whether recorded experts are used. `balance`: coefficient of the balance loss."""
        self._routers = tuple(routers)
        self._num_layers = num_layers
        self._replays = replays
        self._balance = balance
        self._recorded_TLK: Tensor | None = None
        self._watch: _Watch | None = None  # of the last forward with gradient
        self._is_watching = False
        self._totals: _Totals | None = None
        for index, router in enumerate(self._routers):
            router.module.register_forward_hook(partial(self._direct, index))

    # ---------------------------------------------------------------------------------------------- a forward

    def read(self, recorded_TW: NDArray[np.int16] | None) -> NDArray[np.int64] | None:
        """Return recorded experts (i16[T, W], see `Microbatch`) as i64[T, L, K]; None if they are not
        replayed.

        Raises:
            LearnerError: they are of another model.
        """
        if recorded_TW is None or not self._replays or not self._routers:
            return None
        first = self._routers[0]
        try:
            table = as_table(recorded_TW, num_layers=self._num_layers, top_k=first.top_k)
        except ValueError as error:
            raise LearnerError(f"the servers' experts cannot be replayed: {error}") from error
        if len(table) != len(recorded_TW) or table.max(initial=0) >= first.num_experts:
            raise LearnerError(
                f"the servers' experts cannot be replayed: they have {recorded_TW.shape[1]} numbers per "
                f"token, up to {table.max(initial=0)}; the model has {self._num_layers} layers with "
                f"{first.top_k} of {first.num_experts} experts per token"
            )
        return table.astype(np.int64)

    @contextmanager
    def directed(self, given: ForwardInput) -> Iterator[None]:
        """Direct the routers of the forward of `given` inside.

        The experts stay in place afterwards: with gradient checkpointing the backward computes the layers
        again.
        """
        self._recorded_TLK = given.experts
        self._is_watching = torch.is_grad_enabled() and bool(self._routers)
        if self._is_watching:
            self._watch = _Watch(given)
        try:
            yield
        finally:
            self._is_watching = False

    def _direct(self, index: int, module: nn.Module, inputs: Any, output: Any) -> Any:
        logits_TE, weights_TK, own_TK = output
        if not (self._balance or self._recorded_TLK is not None or self._is_watching):
            return output
        router = self._routers[index]
        # As in transformers: in float32 whatever the model's dtype. Whether they are computed must not depend
        # on who watches: gradient checkpointing computes a layer again, and must save as many tensors.
        needs_weights = bool(self._balance) or self._recorded_TLK is not None
        probabilities_TE = logits_TE.softmax(dim=-1, dtype=torch.float32) if needs_weights else None
        experts_TK = own_TK
        if self._recorded_TLK is not None and probabilities_TE is not None:
            recorded_TK = self._recorded_TLK[:, router.layer]
            experts_TK = torch.where(recorded_TK == NOT_RECORDED, own_TK, recorded_TK)
            weights_TK = router.weights(probabilities_TE, experts_TK).to(weights_TK.dtype)
        if self._is_watching:
            assert self._watch is not None
            self._watch.add(probabilities_TE, experts_TK, own_TK, self._recorded_of(router))
        return logits_TE, weights_TK, experts_TK

    def _recorded_of(self, router: ExpertRouter) -> Tensor | None:
        return None if self._recorded_TLK is None else self._recorded_TLK[:, router.layer]

    # --------------------------------------------------------------------------------------------- an update

    def begin_update(self, num_tokens: int) -> None:
        """Forget what was counted. A collective of a model with routers.

        num_tokens: of this rank's microbatches, without fillers.
        """
        if self._routers:
            total = add_over_ranks({"tokens": float(num_tokens)})["tokens"]
            self._totals = _Totals(len(self._routers), self._routers[0].num_experts, total)

    def part(self) -> Tensor | float:
        """Count the last forward and return its part of the update's balance loss, with gradient."""
        if self._watch is None or self._totals is None:
            return 0.0
        watch, self._watch = self._watch, None
        self._totals.add(watch)
        if not self._balance or watch.is_of_filler:
            return 0.0
        loss = watch.balance(self._routers) / self._totals.num_tokens
        self._totals.balance.append(loss.detach())
        return self._balance * loss

    def finish_update(self) -> dict[str, float]:
        """Return the metrics of the update, equal on every rank. A collective of a model with routers.

        `router/busiest`: tokens of a layer's busiest expert over those of an even division, mean over layers.
        `router/unused`: share of experts that got no token. With replay: `router/replayed`, share of tokens
        with recorded experts, and `router/agreement`, share of these experts that the learner's routers
        choose, too. With a balance loss: `router/balance`, before its coefficient.
        """
        totals, self._totals = self._totals, None
        if totals is None:
            return {}
        loads_RE = sum_over_ranks(totals.loads_RE)
        sums = add_over_ranks(totals.sums)
        if not sums["choices"]:
            return {}  # trained on something else than log-probabilities
        means_R = loads_RE.mean(dim=1).clamp(min=1e-9)
        metrics = {
            "router/busiest": float((loads_RE.max(dim=1).values / means_R).mean()),
            "router/unused": float((loads_RE == 0).double().mean()),
        }
        if self._balance:
            metrics["router/balance"] = sums["balance"]
        if self._replays:
            metrics["router/replayed"] = sums["recorded"] / max(sums["choices"], 1.0)
            metrics["router/agreement"] = sums["agreed"] / max(sums["recorded"], 1.0)
        return metrics


class _Watch:
    """What the routers did in one forward, in their order, without padding."""

    def __init__(self, given: ForwardInput) -> None:
        self.experts: list[Tensor] = []  # i64[T, K]
        self.recorded: list[Tensor] = []  # numbers, not read before the update is over: a GPU would wait
        self.agreed: list[Tensor] = []
        self._given = given
        self._probabilities: list[Tensor] = []  # f32[T, E]

    @property
    def is_of_filler(self) -> bool:
        return self._given.is_filler

    def add(
        self, probabilities_TE: Tensor | None, experts_TK: Tensor, own_TK: Tensor, recorded_TK: Tensor | None
    ) -> None:
        num_real = self._given.num_real
        self.experts.append(experts_TK[:num_real])
        if probabilities_TE is not None:
            self._probabilities.append(probabilities_TE[:num_real])
        if recorded_TK is not None:
            recorded, own = recorded_TK[:num_real], own_TK[:num_real]
            self.recorded.append((recorded != NOT_RECORDED).sum())
            self.agreed.append((recorded[:, :, None] == own[:, None, :]).any(dim=-1).sum())

    def balance(self, routers: Sequence[ExpertRouter]) -> Tensor:
        """Return the mean over layers of the segments' losses, each times its tokens, with gradient.

        A collective of ranks that share the microbatch; each returns all of it.
        """
        segments_T, shard = self._given.segments, self._given.shard
        lengths_S = torch.tensor(self._given.lengths, device=segments_T.device)
        terms = []
        for router, probabilities_TE, experts_TK in zip(
            routers, self._probabilities, self.experts, strict=True
        ):
            sums_SE = probabilities_TE.new_zeros(len(lengths_S), router.num_experts).index_add(
                0, segments_T, probabilities_TE
            )
            cells_TK = segments_T[:, None] * router.num_experts + experts_TK
            counts_SE = torch.bincount(cells_TK.flatten(), minlength=sums_SE.numel()).view_as(sums_SE)
            if shard is not None:
                dist.all_reduce(counts_SE, group=shard.group)
                sums_SE = _Sum.apply(sums_SE, shard.group)
            products = (counts_SE * sums_SE / lengths_S[:, None]).sum()
            terms.append(products * router.num_experts / router.top_k)
        return torch.stack(terms).mean()


class _Sum(torch.autograd.Function):
    """The sum over ranks that compute the same loss of it: a rank's part has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Totals:
    """Sums over the forwards of one update on this rank, added up when it is over: until then a GPU need not
    be waited for.

    num_tokens: of the update on all ranks.
    """

    def __init__(self, num_routers: int, num_experts: int, num_tokens: float) -> None:
        self.num_tokens = max(num_tokens, 1.0)
        self.balance: list[Tensor] = []
        self._shape = (num_routers, num_experts)
        self._loads_RE: list[Tensor] = []
        self._recorded: list[Tensor] = []
        self._agreed: list[Tensor] = []
        self._num_choices = 0

    def add(self, watch: _Watch) -> None:
        chosen_RC = torch.stack([experts_TK.flatten() for experts_TK in watch.experts])
        ones_RC = torch.ones_like(chosen_RC, dtype=torch.float64)
        self._loads_RE.append(ones_RC.new_zeros(self._shape).scatter_add_(1, chosen_RC, ones_RC))
        self._num_choices += chosen_RC.numel()
        self._recorded += watch.recorded
        self._agreed += watch.agreed

    @property
    def loads_RE(self) -> Tensor:
        """f64[routers, E], choices of each expert, on the CPU."""
        return sum((loads.cpu() for loads in self._loads_RE), torch.zeros(self._shape, dtype=torch.float64))

    @property
    def sums(self) -> dict[str, float]:
        return {
            "balance": float(sum(self.balance)),
            "recorded": float(sum(self._recorded)),
            "agreed": float(sum(self._agreed)),
            "choices": float(self._num_choices),
        }
