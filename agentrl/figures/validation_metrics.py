"""Evaluation figures as training metrics: `val/mean@8`, `val/pass@8`, `val/maj@8`, with intervals."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.figures.summary import Estimate, EvalSummary, SourceSummary


def figures(summary: EvalSummary, *, prefix: str) -> dict[str, float]:
    """Return the figures by metric name, for all problems and for each source.

    Names begin with `prefix`, those of a source with `prefix` + `source/<data_source>/`. `mean@n` is the mean
    over problems of the mean over their n attempts. `pass@k` and `maj@k` are given for k = 2, 4, 8, ... and
    n. `<name>/low` and `<name>/high` are the 95 % interval, if there is one. Figures without scored attempts
    are absent.
    """
    values = dict(_figures(summary.overall, prefix))
    for source in summary.sources:
        values |= _figures(source, f"{prefix}source/{source.name}/")
    return values


def shown_ks(n: int) -> list[int]:
    """Return the k in 1..n that are shown: powers of two, and n."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def _figures(source: SourceSummary, prefix: str) -> Iterator[tuple[str, float]]:
    yield from _estimate(f"{prefix}mean@{source.n}", source.accuracy)
    ks = shown_ks(source.n)[1:]
    for name, figures_at in (("pass", source.pass_at), ("maj", source.majority_at)):
        for at in figures_at:
            if at.k in ks:
                yield from _estimate(f"{prefix}{name}@{at.k}", at.estimate)


def _estimate(name: str, estimate: Estimate | None) -> Iterator[tuple[str, float]]:
    if estimate is None:
        return
    yield name, estimate.value
    if estimate.low is not None and estimate.high is not None:
        yield f"{name}/low", estimate.low
        yield f"{name}/high", estimate.high
