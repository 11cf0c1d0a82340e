"""Thresholds of an evaluation: `gsm8k=0.5`, `gsm8k.pass@8=0.7`. Missing one sets an exit code for CI."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.errors import ConfigError
from agentrl.figures.summary import OVERALL, Estimate, EstimateAt, EvalSummary, SourceSummary, estimate_at

EXIT_BELOW = 3
"""Exit code if a threshold was missed. 1 is an infrastructure failure, 2 a user error."""
ACCURACY = "accuracy"
FIGURES = "accuracy (mean@n), format, pass@K, maj@K, best@K"

_WRITTEN = re.compile(r"accuracy|format|(?:pass|maj|best)@[1-9][0-9]*")
_PLAIN: Mapping[str, Callable[[SourceSummary], Estimate | None]] = {
    ACCURACY: lambda s: s.accuracy,
    "format": lambda s: s.format_rate,
}
_AT: Mapping[str, Callable[[SourceSummary], Sequence[EstimateAt]]] = {
    "pass": lambda s: s.pass_at,
    "maj": lambda s: s.majority_at,
    "best": lambda s: s.best_of_at,
}


@dataclass(frozen=True, slots=True)
class Threshold:
    """Minimum value of a figure of a source.

    Attributes:
        source: as written; `all` means all problems together.
        figure: accuracy, format, pass@K, maj@K or best@K.
        wanted: in [0, 1].
    """

    source: str
    figure: str
    wanted: float

    @property
    def k(self) -> int | None:
        """Number of attempts of the figure; None if it has no k."""
        _, _, k = self.figure.partition("@")
        return int(k) if k else None


def parse_threshold(text: str) -> Threshold:
    """Parse `SOURCE=VALUE` or `SOURCE.FIGURE=VALUE`; a source may contain dots and slashes.

    Raises:
        ConfigError: the text has another form, or the value is not a number in [0, 1].
    """
    target, sign, value = text.rpartition("=")
    source, _, figure = target.rpartition(".")
    if not _WRITTEN.fullmatch(figure) or not source:
        source, figure = target, ACCURACY
    try:
        wanted = float(value)
    except ValueError:
        wanted = math.nan
    if not sign or not source or not 0 <= wanted <= 1:
        raise ConfigError(
            f"--fail-below {text!r} must be SOURCE=VALUE or SOURCE.FIGURE=VALUE with a value from 0 to 1, "
            f"such as gsm8k=0.5 or gsm8k.pass@8=0.7; figures: {FIGURES}"
        )
    return Threshold(source, figure, wanted)


def refuse_unknown(thresholds: Sequence[Threshold], sources: Sequence[str], *, n: int) -> None:
    """Refuse thresholds that could never be checked, before anything runs.

    Args:
        sources: `data_source` of the rows to evaluate on.
        n: attempts per problem.

    Raises:
        ConfigError: a source is unknown or ambiguous, or k exceeds n.
    """
    for threshold in thresholds:
        _resolve(threshold.source, sources)
        if threshold.k is not None and threshold.k > n:
            raise ConfigError(
                f"--fail-below {threshold.source}.{threshold.figure} needs more attempts than n={n} per "
                f"problem; use --n {threshold.k}"
            )


def failed_thresholds(thresholds: Sequence[Threshold], summary: EvalSummary) -> list[str]:
    """Return one line for each threshold that was missed: value, interval, and wanted value.

    A figure that the evaluation does not have (nothing was scored, no answers to vote on) counts as missed.
    """
    by_name = {source.name: source for source in summary.sources}
    lines = []
    for threshold in thresholds:
        name = _resolve(threshold.source, list(by_name))
        estimate = _estimate(threshold, summary.overall if name == OVERALL else by_name[name])
        if estimate is None:
            lines.append(
                f"{name}: {threshold.figure} could not be measured; required: at least {threshold.wanted:g}"
            )
        elif estimate.value < threshold.wanted:
            lines.append(
                f"{name}: {threshold.figure} is {estimate.value:.4f}{_interval(estimate)}; required: at "
                f"least {threshold.wanted:g}"
            )
    return lines


def _resolve(written: str, sources: Sequence[str]) -> str:
    """Return the source with this full name, or with this name after its last slash."""
    if written in sources or written == OVERALL:
        return written
    meant = [source for source in sources if source.rpartition("/")[2] == written]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ConfigError(
            f"--fail-below {written}: several sources have this name; use one of {', '.join(sorted(meant))}"
        )
    known = ", ".join([*sorted(sources), OVERALL])
    raise ConfigError(
        f"--fail-below {written}: no such source; available: {known} (each with the figures {FIGURES})"
    )


def _estimate(threshold: Threshold, source: SourceSummary) -> Estimate | None:
    if threshold.k is None:
        return _PLAIN[threshold.figure](source)
    return estimate_at(_AT[threshold.figure.partition("@")[0]](source), threshold.k)


def _interval(estimate: Estimate) -> str:
    return (
        ""
        if estimate.low is None or estimate.high is None
        else f" (95 % interval {estimate.low:.4f} to {estimate.high:.4f})"
    )
