"""The state of a run as its files show it: metrics, alarms, servers, the ledger's counts, failures."""

from __future__ import annotations

import json
import math
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from agentrl.data.failures import FILE as FAILURES
from agentrl.data.parquet_files import read_table
from agentrl.errors import AgentRLError, CheckpointError, DataError
from agentrl.extras.view.fleet import ActorState, FleetState, ServerState, read_fleet
from agentrl.extras.view.sources import METRICS, ViewSource
from agentrl.extras.view.token_texts import read_config
from agentrl.tracking.closing_table import VALIDATIONS, ClosingTable, closing_rows, read_validations
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.seals import check_line, checked_lines

MAX_POINTS = 1_200
"""Points of a curve that are sent; more are averaged in equal groups."""
MAX_FAILURES = 12
MAX_ALARMS = 200
_RECENT = 20
DAMAGED = "damaged file"
T = TypeVar("T")
State = Literal["starting", "running", "ended", "stopped"]


class MetricsTail:
    """The records of a growing `metrics.jsonl`: each line is read once. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: list[StepRecord] = []
        self._checksum = 0
        self._read: tuple[int, int] = (0, 0)  # inode and bytes
        self._lock = threading.Lock()

    def records(self) -> list[StepRecord]:
        """Return all records; the file is read again from its beginning if it was replaced or cut.

        Raises:
            DataError: a line is no record, or was changed, or one is missing before it.
        """
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    status = self._path.stat()
                    inode, done = self._read
                    if inode != status.st_ino or status.st_size < done:
                        self._records, self._checksum, done = [], 0, 0
                    file.seek(done)
                    lines = file.read().split(b"\n")[:-1]
            except OSError:
                return list(self._records)
            for line in lines:
                where = f"{self._path}, line {len(self._records) + 1}"
                try:
                    self._checksum = check_line(line + b"\n", self._checksum, where)
                    self._records.append(StepRecord.from_line(line))
                except CheckpointError as error:
                    raise DataError(str(error)) from error
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise DataError(f"{where}: not a metrics record ({error})") from error
                done += len(line) + 1
                self._read = (status.st_ino, done)
            return list(self._records)


@dataclass(frozen=True, slots=True)
class ShownAlarm:
    step: int
    event: str
    rule: str
    metric: str
    value: float
    bound: float
    advice: str


@dataclass(frozen=True, slots=True)
class EqualFailures:
    """Equal failures: how many, what became of them, the steps of the first and the last."""

    count: int
    outcome: str
    text: str
    place: str
    plugin: str | None
    became: dict[str, int]
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The state of a source. Fields that its files do not show are None or empty.

    ledger: number of groups by state, and of dropped ones by reason, when the last step was recorded.
    servers_time: when the run last saw its servers and actors, in seconds since the epoch.
    publish: seconds and bytes of the last publish that was recorded, and the share of the time it takes.
    alarms: those of the run, and one for each file of it that is damaged and therefore not shown.
    eta_s: by the mean of the last steps. names: of all metrics. table: the closing table, its header first.
    """

    title: str
    kind: str
    state: State
    project: str
    step: int
    steps: int | None
    version: int | None
    wall_s: float
    eta_s: float | None
    max_staleness: int | None
    latest: dict[str, float]
    ledger: dict[str, int]
    dropped: dict[str, int]
    publish: dict[str, float]
    servers: tuple[ServerState, ...]
    actors: tuple[ActorState, ...]
    servers_time: float | None
    alarms: tuple[ShownAlarm, ...]
    failures: tuple[EqualFailures, ...]
    num_failures: int
    table: tuple[tuple[str, ...], ...]
    names: tuple[str, ...]
    validation_names: tuple[str, ...]
    config: dict[str, Any]
    command: str


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves over steps; values are aligned with `steps`, None where they are not defined."""

    kind: str
    steps: list[float | None]
    wall_s: list[float | None]
    values: dict[str, list[float | None]]


class RunReader:
    """Reads one source's state. Thread-safe."""

    def __init__(self, source: ViewSource) -> None:
        self.source = source
        self._metrics = MetricsTail(source.folder / METRICS)

    def overview(self) -> Overview:
        """Return the state now."""
        folder, records = self.source.folder, self._metrics.records()
        train = [record for record in records if record.kind == "train"]
        last = train[-1] if train else records[-1] if records else None
        damages: list[str] = []
        is_folder = self.source.kind != "files"
        nothing: dict[str, Any] = {}
        config = _unless_damaged(damages, lambda: read_config(folder) if is_folder else nothing, nothing)
        steps = _at(config, "trainer", "steps") if self.source.kind == "run" else None
        latest = {} if last is None else _finite(last.values)
        no_failures: tuple[tuple[EqualFailures, ...], int] = ((), 0)
        failures, num_failures = _unless_damaged(
            damages, lambda: _failures(folder / FAILURES) if is_folder else no_failures, no_failures
        )
        fleet = _unless_damaged(damages, lambda: read_fleet(folder), FleetState())
        no_alarms: tuple[ShownAlarm, ...] = ()
        alarms = _unless_damaged(damages, lambda: _alarms(folder / "alarms.jsonl"), no_alarms)
        step = 0 if last is None else last.step
        no_table: tuple[tuple[str, ...], ...] = ()
        table = _unless_damaged(damages, lambda: _closing(folder / VALIDATIONS, step), no_table)
        state = self._state(last)
        return Overview(
            title=self.source.title,
            kind=self.source.kind,
            state=state,
            project=f"{_at(config, 'trainer', 'project_name') or ''}",
            step=step,
            steps=steps,
            version=None if last is None else last.version,
            wall_s=0.0 if last is None else last.wall_s,
            eta_s=_eta(train, steps) if state == "running" else None,
            max_staleness=_at(config, "buffer", "max_staleness"),
            latest=latest,
            ledger={
                name: int(latest[f"buffer/{name}"])
                for name in ("drawn", "queued", "leased", "ready", "consumed")
                if f"buffer/{name}" in latest
            },
            dropped={
                name.removeprefix("buffer/dropped_"): int(value)
                for name, value in latest.items()
                if name.startswith("buffer/dropped_") and value
            },
            publish=_publish(train),
            servers=fleet.servers,
            actors=fleet.actors,
            servers_time=fleet.time,
            alarms=(*alarms, *(ShownAlarm(step, "raised", DAMAGED, DAMAGED, 1.0, 0.0, d) for d in damages)),
            failures=failures,
            num_failures=num_failures,
            table=table,
            names=tuple(sorted({name for record in train for name in record.values})),
            validation_names=tuple(
                sorted({name for record in records if record.kind == "validation" for name in record.values})
            ),
            config=config_leaves(config),
            command=f"agentrl view {folder}",
        )

    def series(self, kind: str, names: Sequence[str], *, max_points: int = MAX_POINTS) -> Curves:
        """Return curves by name; `kind` is train or validation.

        Raises:
            DataError: there is no such kind.
        """
        if kind not in ("train", "validation"):
            raise DataError(f"kind={kind!r}: curves are of train or validation")
        records = [record for record in self._metrics.records() if record.kind == kind]
        return Curves(
            kind,
            thinned([float(record.step) for record in records], max_points),
            thinned([record.wall_s for record in records], max_points),
            {
                name: thinned([record.values.get(name, math.nan) for record in records], max_points)
                for name in names
            },
        )

    def records(self) -> list[StepRecord]:
        """Return all records."""
        return self._metrics.records()

    def _state(self, last: StepRecord | None) -> State:
        if self.source.is_live:
            return "running" if last is not None else "starting"
        ended = "result.json" if self.source.kind == "run" else "results.json"
        return "ended" if (self.source.folder / ended).is_file() or self.source.kind == "files" else "stopped"


def thinned(values: Sequence[float], max_points: int = MAX_POINTS) -> list[float | None]:
    """Return a curve of at most `max_points`, in six digits; None where it is not defined."""
    array = np.asarray(values, np.float64)
    if len(array) > max_points:
        groups = np.array_split(array, max_points)
        means = [float(known.mean()) if len(known := g[np.isfinite(g)]) else math.nan for g in groups]
        array = np.asarray(means)
    return [finite_or_none(value) for value in array.tolist()]


def finite_or_none(value: float | None) -> float | None:
    """Return a number in six digits; None if it is not defined."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _at(config: Mapping[str, Any], *keys: str) -> Any:
    found: Any = config
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def config_leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a config by dotted key; a list is a leaf."""
    if isinstance(config, Mapping) and config:
        return {
            key: value
            for name, inner in config.items()
            for key, value in config_leaves(inner, f"{prefix}.{name}" if prefix else str(name)).items()
        }
    return {prefix: config} if prefix else {}


def _eta(train: Sequence[StepRecord], steps: int | None) -> float | None:
    if not train or steps is None:
        return None
    recent = [record.values.get("time/step_s", math.nan) for record in train[-_RECENT:]]
    known = [seconds for seconds in recent if math.isfinite(seconds)]
    return statistics.fmean(known) * max(0, steps - train[-1].step) if known else None


def _publish(train: Sequence[StepRecord]) -> dict[str, float]:
    """Return what a publish costs: means over the last steps."""
    names = {
        "seconds": "time/publish_s",
        "share": "time/share/publish",
        "bytes": "publish/bytes",
        "pause_s": "publish/pause_s",
    }
    found: dict[str, float] = {}
    for own, name in names.items():
        values = [v for record in train[-_RECENT:] if math.isfinite(v := record.values.get(name, math.nan))]
        if values:
            found[own] = statistics.fmean(values)
    return found


def _unless_damaged(damages: list[str], read: Callable[[], T], default: T) -> T:
    """Return what `read` returns; if it finds its file damaged, add a line to `damages`: a damaged file hides
    only itself.
    """
    try:
        return read()
    except AgentRLError as error:
        damages.append(str(error))
        return default


def _alarms(file: Path) -> tuple[ShownAlarm, ...]:
    found = []
    for line in checked_lines(file) if file.exists() else ():
        try:
            raw = json.loads(line)
            names = ("step", "event", "rule", "metric", "value", "bound", "advice")
            found.append(ShownAlarm(**{name: raw[name] for name in names}))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{file} is damaged: line {len(found) + 1} is no alarm ({error})") from error
    return tuple(found[-MAX_ALARMS:])


def _failures(file: Path) -> tuple[tuple[EqualFailures, ...], int]:
    """Return equal failures, the most frequent first, and the number of all."""
    names = ["step", "outcome", "became", "kind", "plugin", "text", "place"]
    if not file.exists():
        return (), 0
    table = read_table(file, "a Parquet file of failures", columns=names)
    kinds: dict[tuple[Any, ...], list[Any]] = {}
    columns = [table[name].to_pylist() for name in names]
    for step, outcome, became, kind, plugin, text, place in zip(*columns, strict=True):
        known = kinds.setdefault(
            (outcome, kind, plugin, place or text, place), [0, text, Counter(), step, step]
        )
        known[0] += 1
        known[2][became] += 1
        known[4] = step
    ordered = sorted(kinds.items(), key=lambda item: -item[1][0])[:MAX_FAILURES]
    return tuple(
        EqualFailures(
            count,
            outcome,
            str(text)[:2000],
            str(place or ""),
            None if kind is None else f"{kind} {plugin}",
            dict(became),
            first,
            last,
        )
        for (outcome, kind, plugin, _, place), (count, text, became, first, last) in ordered
    ), table.num_rows


def _closing(file: Path, step: int) -> tuple[tuple[str, ...], ...]:
    results = read_validations(file)
    table = ClosingTable(closing_rows(results, step=step))
    return (table.header(), *table.cells()) if results else ()
