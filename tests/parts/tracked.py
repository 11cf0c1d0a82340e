"""What the trackers of a run folder stored, read back with their own readers: {name: {step: value}}."""

import json
from pathlib import Path

from parts.wandb_files import logged

AXES = {"step"}
TABLES = ("val/attempts", "alarms/log")


def wandb_scalars(folder: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in logged(folder):
        for name, value in row.items():
            if name not in AXES and not name.startswith(tuple(f"{table}/" for table in TABLES)):
                found.setdefault(name, {})[row["step"]] = value
    return found


def wandb_tables(folder: Path, name: str) -> dict[int, list[dict]]:
    """Return the rows of the table `name` by the step at which it was logged."""
    found = {}
    for row in logged(folder):
        if (path := row.get(f"{name}/path")) is not None:
            (file,) = folder.glob(f"wandb/offline-run-*/files/{path}")
            table = json.loads(file.read_text())
            found[row["step"]] = [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]
    return found


def tensorboard_scalars(folder: Path) -> dict[str, dict[int, float]]:
    events = _events(folder)
    return {
        name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]
    }


def tensorboard_texts(folder: Path) -> dict[str, dict[int, str]]:
    events = _events(folder)
    return {
        name.removesuffix("/text_summary"): {
            event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(name)
        }
        for name in events.Tags()["tensors"]
    }


def _events(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


class MlflowRun:
    """The run of a folder in MLflow's store."""

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        self._id = (folder / "mlflow_id.txt").read_text()

    @property
    def scalars(self) -> dict[str, dict[int, float]]:
        names = self._client.get_run(self._id).data.metrics
        return {
            name: {m.step: m.value for m in self._client.get_metric_history(self._id, name)} for name in names
        }

    @property
    def params(self) -> dict[str, str]:
        return self._client.get_run(self._id).data.params

    @property
    def tags(self) -> dict[str, str]:
        return self._client.get_run(self._id).data.tags

    @property
    def status(self) -> str:
        return self._client.get_run(self._id).info.status

    def table(self, name: str, step: int) -> list[dict]:
        table = json.loads(self.text(f"{name}/step_{step:06d}.json"))
        return [dict(zip(table["columns"], cells, strict=True)) for cells in table["data"]]

    def text(self, path: str) -> str:
        return Path(self._client.download_artifacts(self._id, path)).read_text()
