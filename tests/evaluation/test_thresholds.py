"""--fail-below: what is written, what is refused before a run, what is said after it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.figures.attempts import EvaluatedAttempt
from agentrl.figures.summary import summarise
from agentrl.figures.thresholds import Threshold, failed_thresholds, parse_threshold, refuse_unknown
from parts.attempts import evaluated


def attempts(source: str, right: dict[str, int], n: int = 4) -> list[EvaluatedAttempt]:
    """n attempts per problem, of which `right[problem]` are right."""
    return [
        evaluated(problem, member, float(member < num), source=source, answer="7" if member < num else "8")
        for problem, num in right.items()
        for member in range(n)
    ]


def test_what_is_written_is_read():
    assert parse_threshold("gsm8k=0.5") == Threshold("gsm8k", "accuracy", 0.5)
    assert parse_threshold("gsm8k.pass@8=0.7") == Threshold("gsm8k", "pass@8", 0.7)
    assert parse_threshold("openai/gsm8k.maj@32=1") == Threshold("openai/gsm8k", "maj@32", 1.0)
    assert parse_threshold("math.v1.5=0.25") == Threshold("math.v1.5", "accuracy", 0.25), (
        "a source may have dots of its own"
    )
    assert parse_threshold("a=b=0.5") == Threshold("a=b", "accuracy", 0.5)


@given(
    st.text(st.characters(codec="ascii", exclude_characters="="), min_size=1).filter(
        lambda s: not s.endswith(".")
    ),
    st.sampled_from(["accuracy", "format", "pass@1", "maj@16", "best@3"]),
    st.floats(0, 1),
)
def test_any_source_may_be_named(source, figure, wanted):
    assert parse_threshold(f"{source}.{figure}={wanted!r}") == Threshold(source, figure, wanted)


@pytest.mark.parametrize(
    "text", ["gsm8k", "=0.5", "gsm8k=", "gsm8k=half", "gsm8k=1.5", "gsm8k=-0.1", "gsm8k=nan", "gsm8k=50%"]
)
def test_anything_else_is_refused_with_an_example(text):
    with pytest.raises(
        ConfigError, match=r"must be SOURCE=VALUE or SOURCE.FIGURE=VALUE .* such as gsm8k=0.5"
    ):
        parse_threshold(text)


def test_what_could_never_be_checked_is_refused_before_anything_runs():
    sources = ["openai/gsm8k", "a/math", "b/math"]
    refuse_unknown(
        [parse_threshold(t) for t in ("gsm8k=0.5", "openai/gsm8k.pass@4=0.5", "b/math=0", "all=0.1")],
        sources,
        n=4,
    )
    for text, why in [
        ("gsm9k=0.5", r"no such source; available: a/math, b/math, openai/gsm8k, all"),
        ("gsm8k.pas@4=0.5", r"gsm8k.pas@4: no such source.* figures accuracy"),
        ("math=0.5", r"several sources have this name; use one of a/math, b/math"),
        ("gsm8k.maj@8=0.5", r"gsm8k.maj@8 needs more attempts than n=4 per problem; use --n 8"),
    ]:
        with pytest.raises(ConfigError, match=why):
            refuse_unknown([parse_threshold(text)], sources, n=4)


def test_each_figure_is_compared_and_each_failure_is_one_line():
    summary = summarise(attempts("openai/gsm8k", {"a": 4, "b": 2, "c": 0}) + attempts("aime", {"d": 1}))
    # accuracy (1 + 1/2 + 0) / 3, pass@4 2/3, overall accuracy (1 + 1/2 + 0 + 1/4) / 4
    reached = ["gsm8k=0.5", "gsm8k.pass@4=0.66", "gsm8k.format=1", "all=0.4375", "aime.pass@4=1"]
    assert failed_thresholds([parse_threshold(text) for text in reached], summary) == []
    (line,) = failed_thresholds([parse_threshold("gsm8k=0.51")], summary)
    estimate = summary.sources[1].accuracy
    assert line == (
        f"openai/gsm8k: accuracy is 0.5000 (95 % interval {estimate.low:.4f} to {estimate.high:.4f}); "
        "required: at least 0.51"
    )
    two = failed_thresholds([parse_threshold("gsm8k.pass@4=0.67"), parse_threshold("all=0.44")], summary)
    assert [line.partition(" is ")[0] for line in two] == ["openai/gsm8k: pass@4", "all: accuracy"]


def test_what_was_not_measured_is_not_reached():
    summary = summarise(attempts("gsm8k", {"a": 4}, n=2))
    assert failed_thresholds([parse_threshold("gsm8k.pass@8=0")], summary) == [
        "gsm8k: pass@8 could not be measured; required: at least 0"
    ]
