"""Options of losses that are more than a number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClipConfig:
    """Bounds of the ratio, [1 - low, 1 + high], and of the loss at negative advantage (`dual`; None: off)."""

    low: float
    high: float
    dual: float | None = None


@dataclass(frozen=True, slots=True)
class WeightRule:
    """How rho' becomes the importance weight of a token.

    level: `token`: rho' of the token; `sequence`: product of rho' over its sequence; `geometric`: geometric
    mean of rho' over its sequence.
    cap, floor: bounds of the weight (floor None: no lower bound).
    outside: a weight outside the bounds is clamped to the bound (`truncate`) or set to 0 (`mask`).
    """

    level: str
    cap: float
    floor: float | None = None
    outside: str = "truncate"
