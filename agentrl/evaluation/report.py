"""The report of an evaluation: `results.json` for programs, `report.md` for people, `report.png` with plots.

```
results.json
    format         version of this layout, raised when a key changes its meaning
    run            what was run: model, servers, data_sets, sampling, started, seconds,
                   agentrl {version, commit}, config
    summary        sources [...] and overall, see `agentrl.figures.summary.SourceSummary`;
                   each figure {value, low, high}
    readings       source -> {strict, flexible}: accuracy of answers in the requested form, and in any form
    failures       reason -> number of attempts
    contamination  overlap with training files, see `ContaminationNote`; null if none was checked
    thresholds     one line for each threshold that was missed; empty if all were reached
```
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from agentrl.data.atomic_files import appearing_whole
from agentrl.errors import InfrastructureError
from agentrl.evaluation.contamination import ContaminationNote
from agentrl.evaluation.description import RunDescription
from agentrl.evaluation.evidence import Evidence
from agentrl.evaluation.report_text import markdown
from agentrl.figures.summary import EvalSummary, summarise
from agentrl.figures.thresholds import Threshold, failed_thresholds
from agentrl.registered import all_of

FORMAT = 1
RESULTS, TEXT, PICTURE = "results.json", "report.md", "report.png"


@dataclass(frozen=True, slots=True)
class Report:
    """The summary, and the folder of the files.

    `failed_thresholds`: one line for each threshold that was missed.
    """

    folder: Path
    summary: EvalSummary
    failed_thresholds: tuple[str, ...]


def write_report(
    folder: Path,
    run: RunDescription,
    evidence: Evidence,
    *,
    contamination: ContaminationNote | None = None,
    thresholds: Sequence[Threshold] = (),
) -> Report:
    """Summarise the attempts of `evidence`, and write the three files into `folder`.

    Raises:
        ValueError: there are no attempts.
        InfrastructureError: a file cannot be written.
    """
    summary = summarise(evidence.attempts)
    failed = failed_thresholds(thresholds, summary)
    description = run.to_json()
    results = {
        "format": FORMAT,
        "run": description,
        "summary": summary.to_json(),
        "readings": {source: dataclasses.asdict(both) for source, both in evidence.readings.items()},
        "failures": dict(evidence.failures.most_common()),
        "contamination": None if contamination is None else dataclasses.asdict(contamination),
        "thresholds": failed,
    }
    folder.mkdir(parents=True, exist_ok=True)
    title = PurePath(str(description["model"])).name
    for draw in all_of("agentrl.evaluation_reports"):  # matplotlib takes about a second to load
        draw(summary, evidence.attempts, folder / PICTURE, title=title)
    _write(folder / TEXT, markdown(description, summary, evidence, contamination, picture=PICTURE))
    _write(
        folder / RESULTS,
        json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n",
    )
    return Report(folder, summary, tuple(failed))


def _write(path: Path, text: str) -> None:
    """Write a file atomically. Lone surrogates, which a model may write, are replaced by `?`."""
    try:
        with appearing_whole(path) as partial:
            partial.write_bytes(text.encode(errors="replace"))
    except OSError as error:
        raise InfrastructureError(f"cannot write {path}: {error.strerror or error}") from error
