"""Sampling of one token per request, with the log-probability that SGLang would report.

Legend: B requests that get a token in this forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_CHUNK_SCORES = {"cpu": 2**17, "cuda": 2**25}
"""Scores that are sampled from at once, by device. On a CPU their float64 sums fit the cache of a core; a GPU
waits for each chunk, so that of 32 requests of a large vocabulary one is enough.
"""
_FIRST_SELECTED = 4096
"""So many of the most likely tokens are selected first for top_p and min_p; if too few, all are sorted."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of one request: temperature 0 is greedy, top_k -1 is off, seed None is random."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None

    @property
    def is_truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


GREEDY = RowSampling(temperature=0.0)


def sample(
    logits_BV: Tensor, rows: Sequence[RowSampling], uniforms: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Sample one token per request by inverse transform, and return its log-probability.

    The token of a request depends on its own logits, parameters and uniform number alone.

    The semantics are SGLang's. The log-probability is that of softmax(logits / temperature) over the whole
    vocabulary: top_p, top_k and min_p restrict the choice but do not renormalise it. A greedy request takes
    the largest logit and reports its log-probability at temperature 1.

    If a request's logits are not finite, it gets an arbitrary token with log-probability NaN. The other
    requests are not affected.

    Args:
        logits_BV: f32[B, V].
        rows: B entries.
        uniforms: B numbers in [0, 1).

    Returns:
        tokens: i64[B]; logprobs: f32[B].
    """
    tokens_B = torch.zeros(len(rows), dtype=torch.int64, device=logits_BV.device)
    logprobs_B = torch.zeros(len(rows), dtype=logits_BV.dtype, device=logits_BV.device)
    for draw, members in _chunks(rows, vocabulary=logits_BV.shape[1], device=logits_BV.device.type):
        chosen = [rows[i] for i in members]
        scores_BV = logits_BV[members]
        # Subtract the maximum first: a small temperature then turns only logits without a chance into -inf.
        scores_BV -= scores_BV.amax(dim=-1, keepdim=True)
        if any(row.temperature not in (0.0, 1.0) for row in chosen):
            scores_BV /= scores_BV.new_tensor([row.temperature or 1.0 for row in chosen]).unsqueeze(1)
        uniforms_B = torch.tensor(
            [uniforms[i] for i in members], dtype=torch.float64, device=logits_BV.device
        )
        drawn_B, totals_B = draw(scores_BV, chosen, uniforms_B)
        tokens_B[members] = drawn_B
        logprobs_B[members] = (_at(scores_BV, drawn_B) - totals_B.log()).to(logprobs_B.dtype)
    return tokens_B, logprobs_B


Draw = Callable[[Tensor, Sequence[RowSampling], Tensor], tuple[Tensor, Tensor]]
"""(scores_BV with maximum 0, rows, uniforms_B f64) -> tokens i64[B], sums of exponentials f64[B]."""


def _chunks(rows: Sequence[RowSampling], *, vocabulary: int, device: str) -> Iterator[tuple[Draw, list[int]]]:
    """Group the rows by how their token is drawn, and split the groups."""
    groups: dict[Draw, list[int]] = {}
    for i, row in enumerate(rows):
        draw: Draw = _greedy if row.temperature == 0.0 else _truncated if row.is_truncated else _any_token
        groups.setdefault(draw, []).append(i)
    size = max(1, _CHUNK_SCORES.get(device, _CHUNK_SCORES["cpu"]) // vocabulary)
    for draw, members in groups.items():
        for start in range(0, len(members), size):
            yield draw, members[start : start + size]


def _greedy(scores_BV: Tensor, rows: Sequence[RowSampling], uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    return scores_BV.argmax(dim=-1), scores_BV.exp().sum(dim=-1).double()


def _any_token(scores_BV: Tensor, rows: Sequence[RowSampling], uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    sums_BV = scores_BV.exp().cumsum(dim=-1, dtype=torch.float64)
    totals_B = sums_BV[:, -1]
    # The product may round up to the sum of all, where no token would be left.
    points_B = torch.minimum(uniforms_B * totals_B, totals_B.nextafter(torch.zeros_like(totals_B)))
    # `right`: the first sum above the point, so that a token of probability 0 is never drawn.
    tokens_B = torch.searchsorted(sums_BV, points_B.unsqueeze(1), right=True).squeeze(1)
    return tokens_B.clamp_(max=scores_BV.shape[1] - 1), totals_B  # beyond the end: NaN


def _truncated(scores_BV: Tensor, rows: Sequence[RowSampling], uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    weights_BV = scores_BV.exp()
    totals_B = weights_BV.sum(dim=-1, dtype=torch.float64)
    tokens = []
    for weights_V, total, row, uniform in zip(
        weights_BV.cpu().numpy(), totals_B.tolist(), rows, uniforms_B.tolist(), strict=True
    ):
        if not np.isfinite(total):
            tokens.append(0)
            continue
        candidates = candidates_of(weights_V, total, row)
        sums = _sums(weights_V[candidates])
        point = min(uniform * sums[-1], np.nextafter(sums[-1], 0.0))
        tokens.append(int(candidates[np.searchsorted(sums, point, side="right")]))
    return torch.tensor(tokens, device=scores_BV.device), totals_B


def candidates_of(weights_V: NDArray[np.floating[Any]], total: float, row: RowSampling) -> NDArray[np.intp]:
    """Return the tokens that top_k, top_p and min_p leave, in ascending order of ids.

    top_p keeps the smallest set whose mass reaches it. min_p keeps tokens with at least this fraction of the
    largest probability. The most likely token always stays. Of equally likely tokens, those with the smaller
    ids stay.

    Args:
        weights_V: probabilities of the vocabulary times one factor, with the maximum 1.
        total: their sum.
    """
    vocabulary = len(weights_V)
    top_k = min(row.top_k, vocabulary) if row.top_k > 0 else vocabulary
    for num_selected in sorted({min(top_k, _FIRST_SELECTED, vocabulary), top_k}):
        selected = np.partition(weights_V, vocabulary - num_selected)[vocabulary - num_selected :]
        selected.sort()
        sums = _sums(selected[::-1])
        if sums[-1] >= row.top_p * total or selected[0] < row.min_p:
            break
    num_kept = num_selected - int(np.searchsorted(selected, selected.dtype.type(row.min_p)))
    # top_p = 1 keeps everything explicitly: a rounded sum may reach the total before its end.
    if row.top_p < 1.0:
        num_kept = min(num_kept, int(np.searchsorted(sums, row.top_p * total)) + 1)
    least = selected[num_selected - num_kept]
    num_above = num_selected - int(np.searchsorted(selected, least, side="right"))
    candidates = np.flatnonzero(weights_V >= least)
    ties = np.flatnonzero(weights_V[candidates] == least)
    return np.delete(candidates, ties[num_kept - num_above :])


def _sums(weights: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return the cumulative sums. numpy's own conversion to float64 within a sum is five times as slow."""
    return torch.from_numpy(weights.copy()).cumsum(0, dtype=torch.float64).numpy()


def _at(scores_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return scores_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
