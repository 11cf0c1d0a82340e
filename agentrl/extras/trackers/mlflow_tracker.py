"""Sends records to MLflow: a server, or by default a database in the run folder, which needs no network."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import ConfigError
from agentrl.extras.trackers.background import BackgroundTracker
from agentrl.tracking.alarms import ALARMS_NAME, Alarm
from agentrl.tracking.attempt_table import TABLE_NAME, SampledAttempts
from agentrl.tracking.metrics import StepRecord
from agentrl.tracking.redact import without_users
from agentrl.tracking.tracker import TrackedRun

# MLflow reports its use to its authors unless it is told not to.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
try:
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient
except ImportError as missing:
    raise ConfigError(
        f"trainer.logger=mlflow needs MLflow ({missing}): pip install 'agentrl[mlflow]'"
    ) from missing

T = TypeVar("T")

URI_VARIABLE = "MLFLOW_TRACKING_URI"
MAX_NAME_CHARS = 250
MAX_VALUE_CHARS = 500
_BATCH_METRICS, _BATCH_PARAMS = 1_000, 100
"""The most that MLflow takes in one call."""
_FOREIGN = re.compile(r"[^\w./ :-]")
_QUICK = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""While a run starts: with MLflow's own settings, a server that is not there would hold it for minutes."""

log = logging.getLogger(__name__)


class MlflowTracker:
    """One MLflow run per run folder: a resumed run continues with the same id, stored in `mlflow_id.txt`."""

    def __init__(
        self,
        run_dir: Path,
        *,
        uri: str | None,
        project: str,
        experiment: str,
        config: Mapping[str, Any],
        restored_step: int | None,
    ) -> None:
        """Start or continue the run. MLflow's experiment is our project, its run is our experiment.

        uri: of a server or a store; None: the one that MLFLOW_TRACKING_URI names, or else `mlflow.db` in
            `run_dir`.

        Raises:
            RuntimeError: the server cannot be reached, or the store cannot be used.
        """
        for chatty in ("mlflow", "alembic"):  # they would write into the live display
            logging.getLogger(chatty).setLevel(logging.WARNING)
        own_store = None if uri or os.environ.get(URI_VARIABLE) else run_dir
        uri = uri or os.environ.get(URI_VARIABLE) or f"sqlite:///{run_dir.absolute() / 'mlflow.db'}"
        self._stores_files = True
        try:
            with _quick_requests():
                self._client = MlflowClient(tracking_uri=uri)
                id_file = run_dir / "mlflow_id.txt"
                if restored_step is not None and id_file.exists():
                    self._run = id_file.read_text().strip()
                    self._client.update_run(self._run, status="RUNNING")
                else:
                    self._run = self._new_run(project, experiment, own_store)
                    id_file.write_text(self._run)
                    self._log_params(config)
        except Exception as error:  # boundary: stores raise errors of their own libraries
            raise RuntimeError(f"{without_users(uri).partition('?')[0]}: {_first_line(error)}") from error

    def log(self, record: StepRecord) -> None:
        """Send the finite values of one record."""
        now_ns = time.time_ns()
        metrics = [
            Metric(valid_name(name), value, now_ns // 1_000_000, record.step)
            for name, value in record.shown().items()
        ]
        for batch in _batches(metrics, _BATCH_METRICS):
            self._client.log_batch(self._run, metrics=batch)

    def log_alarm(self, alarm: Alarm) -> None:
        """Set a tag with the alarm's line: MLflow lists and searches tags."""
        self._client.set_tag(self._run, valid_name(f"{ALARMS_NAME}/{alarm.rule}"), alarm.line())

    def log_attempts(self, table: SampledAttempts) -> None:
        """Store the table as files of the run: JSON for programs, Markdown for people."""
        if not self._stores_files:
            return
        name = f"{TABLE_NAME}/step_{table.step:06d}"
        try:
            self._client.log_text(self._run, table.to_json(), f"{name}.json")
            self._client.log_text(self._run, table.to_markdown(), f"{name}.md")
        except Exception as error:  # noqa: BLE001 - boundary: files may be in a store with errors of its own
            self._stores_files = False
            log.warning("MLflow gets metrics, but no tables of attempts: %s", _first_line(error))

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run)

    def _new_run(self, project: str, experiment: str, own_store: Path | None) -> str:
        found = self._client.get_experiment_by_name(project)
        if found is not None:
            experiment_id = found.experiment_id
        else:
            place = None if own_store is None else (own_store.absolute() / "mlflow_files").as_uri()
            experiment_id = self._client.create_experiment(project, artifact_location=place)
        return str(self._client.create_run(experiment_id, run_name=experiment).info.run_id)

    def _log_params(self, config: Mapping[str, Any]) -> None:
        params = [Param(valid_name(name), str(value)[:MAX_VALUE_CHARS]) for name, value in _leaves(config)]
        for batch in _batches(params, _BATCH_PARAMS):
            self._client.log_batch(self._run, params=batch)


def valid_name(name: str) -> str:
    """Return the name as MLflow accepts it: letters, digits and `_-./ :`, with `/` between folders."""
    parts = _FOREIGN.sub("_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:MAX_NAME_CHARS]


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


@contextmanager
def _quick_requests() -> Iterator[None]:
    """Shorten MLflow's deadlines within the block, unless the user has set them."""
    added = [name for name in _QUICK if name not in os.environ]
    os.environ.update({name: _QUICK[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _first_line(error: BaseException) -> str:
    """Return the kind and the first line of an error. MLflow's contain the URI of its server."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {without_users(first)[:300]}"


def open_mlflow(run: TrackedRun) -> BackgroundTracker:
    """Return the tracker of a run, in a thread of its own: a server may be slow."""
    tracker = MlflowTracker(
        run.run_dir,
        uri=run.mlflow_uri,
        project=run.project,
        experiment=run.experiment,
        config=run.config,
        restored_step=run.restored_step,
    )
    return BackgroundTracker(tracker)
