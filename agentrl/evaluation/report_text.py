"""The report as Markdown: tables of figures with their intervals, warnings, and a few attempts to read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from agentrl.evaluation.contamination import ContaminationNote
from agentrl.evaluation.evidence import Evidence, Example, TwoReadings
from agentrl.figures.summary import Estimate, EvalSummary, estimate_at
from agentrl.figures.validation_metrics import shown_ks
from agentrl.tracking.progress import duration
from agentrl.types import Message

MAX_FAILURES = 10
MAX_EXAMPLES = 12
MAX_MESSAGE_CHARS = 3000
"""Characters shown of one message of an example: its beginning and its end."""
NOT_MEASURED = "-"


def markdown(
    description: Mapping[str, Any],
    summary: EvalSummary,
    evidence: Evidence,
    contamination: ContaminationNote | None,
    *,
    picture: str,
) -> str:
    """Return the whole report.

    Args:
        description: of the run, from `RunDescription.to_json`: without secrets.
        summary: the figures.
        evidence: examples, readings and failures.
        contamination: None: not checked.
        picture: name of the file with the plots, in the report's folder.
    """
    parts = [
        f"# Evaluation of {PurePath(str(description['model'])).name}\n\n{_run_lines(description)}",
        _section("Results", _results(summary), _warnings(summary), f"![plots]({picture})"),
        _section("Several attempts at a problem", _attempts_table(summary)),
        _section("Strict and flexible", _readings_table(evidence.readings)),
        _section("By difficulty", _difficulties(summary)),
        _section("Length and tools", _lengths(summary)),
        _section("Failures", _failures(evidence.failures)),
        _section("Contamination", _contamination(contamination)),
        _section("Examples", *map(_example, evidence.examples[:MAX_EXAMPLES])),
        _section(
            "Config",
            _details("the whole config", json.dumps(description["config"], indent=1, ensure_ascii=False)),
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _section(title: str, *parts: str) -> str:
    """Return a section; "" if it is empty."""
    body = [part for part in parts if part]
    return "\n\n".join([f"## {title}", *body]) if body else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    if not rows:
        return ""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in row) + " |" for row in (header, rule, *rows))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---------------------------------------------------------------------------------------------------- figures


def percent(estimate: Estimate | None) -> str:
    """Return `61.3 % [55.0, 67.2]`."""
    if estimate is None:
        return NOT_MEASURED
    return f"{100 * estimate.value:.1f} %" + _limits(estimate, lambda value: f"{100 * value:.1f}")


def amount(estimate: Estimate | None) -> str:
    """Return `412 [388, 436]`; values below 100 have decimals."""
    if estimate is None:
        return NOT_MEASURED
    digits = 0 if abs(estimate.value) >= 100 else 2
    return f"{estimate.value:.{digits}f}" + _limits(estimate, lambda value: f"{value:.{digits}f}")


def _limits(estimate: Estimate, text: Callable[[float], str]) -> str:
    return (
        ""
        if estimate.low is None or estimate.high is None
        else f" [{text(estimate.low)}, {text(estimate.high)}]"
    )


def _results(summary: EvalSummary) -> str:
    rows = (
        [
            source.name,
            str(source.num_problems),
            str(source.n),
            percent(source.accuracy),
            percent(source.format_rate),
            percent(source.truncation_rate),
            percent(source.failure_rate),
        ]
        for source in summary.shown
    )
    header = ["source", "problems", "n", "accuracy (mean@n)", "right format", "truncated", "failed"]
    return (
        _table(header, rows)
        + "\n\nIn brackets: 95 % intervals, by problem. A failed attempt has no score; it does not count "
        "as a wrong answer."
    )


def _warnings(summary: EvalSummary) -> str:
    named = [(source.name, source) for source in summary.shown]
    named += [
        (f"{source.name}, {part.name}", part) for source in summary.sources for part in source.by_difficulty
    ]
    return "\n".join(f"- **{name}**: {warning}" for name, source in named for warning in source.warnings)


def _attempts_table(summary: EvalSummary) -> str:
    rows = [
        [source.name, str(k), *(percent(estimate_at(figures, k)) for figures in columns)]
        for source in summary.shown
        for columns in [(source.pass_at, source.majority_at, source.best_of_at)]
        for k in shown_ks(source.n)
        if estimate_at(source.pass_at, k) is not None
    ]
    return (
        _table(["source", "k", "pass@k", "maj@k", "best@k"], rows)
        if any(source.n > 1 for source in summary.sources)
        else ""
    )


def _readings_table(readings: Mapping[str, TwoReadings]) -> str:
    rows = [[source, percent(both.strict), percent(both.flexible)] for source, both in readings.items()]
    note = (
        "Strict counts answers in the form that was asked for, flexible those in any form: the difference "
        "measures format, not ability."
    )
    return f"{_table(['source', 'accuracy, strict', 'accuracy, flexible'], rows)}\n\n{note}" if rows else ""


def _difficulties(summary: EvalSummary) -> str:
    rows = (
        [
            source.name,
            part.name,
            str(part.num_problems),
            percent(part.accuracy),
            percent(part.pass_at[-1].estimate if part.pass_at else None),
        ]
        for source in summary.sources
        for part in source.by_difficulty
    )
    return _table(["source", "difficulty", "problems", "accuracy (mean@n)", "pass@n"], rows)


def _lengths(summary: EvalSummary) -> str:
    rows = (
        [
            source.name,
            amount(source.num_tokens),
            amount(source.num_turns),
            amount(source.num_tool_calls),
            percent(source.tool_use_rate),
        ]
        for source in summary.shown
    )
    return (
        _table(["source", "tokens", "turns", "tool calls", "attempts with a tool call"], rows)
        + "\n\nPer scored attempt."
    )


# --------------------------------------------------------------------------------- failures and contamination


def _failures(failures: Mapping[str, int]) -> str:
    most = sorted(failures.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in most[MAX_FAILURES:])
    rows = [[reason, str(count)] for reason, count in most[:MAX_FAILURES]] + (
        [["others", str(rest)]] if rest else []
    )
    return _table(["reason", "attempts"], rows)


def _contamination(note: ContaminationNote | None) -> str:
    if note is None:
        return ""
    compared = (
        f"Compared with {note.num_rows} rows of "
        f"{', '.join(f'`{PurePath(file).name}`' for file in note.files)}, by sequences of 13 words."
    )
    rows = [
        [s.source, str(s.num_questions), str(s.num_overlapping), str(s.num_nearly_whole)]
        for s in note.sources
    ]
    table = _table(["source", "questions", "that share words with a training row", "nearly whole"], rows)
    worst = [
        [o.problem, f"{100 * o.share:.0f} %", f"{PurePath(o.file).name}, row {o.row}", o.excerpt]
        for o in note.worst
    ]
    return "\n\n".join(
        part
        for part in (compared, table, _table(["problem", "share", "training row", "question"], worst))
        if part
    )


# --------------------------------------------------------------------------------------------------- examples


def _example(example: Example) -> str:
    attempt = example.attempt
    facts = [
        f"answer {attempt.answer}" if attempt.answer is not None else "no answer found",
        f"{attempt.num_tokens} tokens",
    ]
    if attempt.reward is not None:
        facts.append(f"reward {attempt.reward:g}")
    if attempt.failure is not None:
        facts = [" ".join(attempt.failure.split())]
    title = (
        f"{example.kind.value}: {attempt.source}, problem {attempt.problem}, attempt {attempt.member} "
        f"({', '.join(facts)})"
    )
    return _details(title, "\n\n".join(text for message in example.messages for text in _message(message)))


def _message(message: Message) -> Iterator[str]:
    if message.reasoning:
        yield f"[{message.role}, thinking]\n{_cut(message.reasoning)}"
    if message.content or not (message.reasoning or message.tool_calls):
        yield f"[{message.role}]\n{_cut(message.content)}"
    for call in message.tool_calls:
        arguments = (
            json.dumps(call.arguments, ensure_ascii=False, default=str) if call.error is None else call.error
        )
        yield f"[call] {call.name} {_cut(arguments)}"


def _cut(text: str) -> str:
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    half = MAX_MESSAGE_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def _details(title: str, text: str) -> str:
    """Return collapsed text.

    Its fence is longer than any fence in the text, so a model's text cannot end it.
    """
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    shown = title.replace("&", "&amp;").replace("<", "&lt;")
    return f"<details><summary>{shown}</summary>\n\n{fence}text\n{text}\n{fence}\n\n</details>"


# -------------------------------------------------------------------------------------------------------- run


def _run_lines(description: Mapping[str, Any]) -> str:
    own = description["agentrl"]
    sampling = ", ".join(
        f"{name} {json.dumps(value)}"
        for name, value in description["sampling"].items()
        if value not in (None, [], {})
    )
    commit = f" ({own['commit']})" if own["commit"] else ""
    lines = [
        f"model `{description['model']}`, {description['servers']}",
        *(
            f"{d['name']}: {d['num_problems']} problems, prompt template `{d['template']}`"
            for d in description["data_sets"]
        ),
        f"sampling: {sampling}",
        f"started {description['started']}, took {duration(description['seconds'])}; agentrl "
        f"{own['version']}{commit}",
    ]
    return "\n".join(f"- {line}" for line in lines)
