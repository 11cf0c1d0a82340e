"""A run without processes, which writes what a run writes: the audit and all readers find it whole."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.journal import FILE, Journal
from agentrl.buffer.ledger import LedgerRules
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.checkpoint import save_checkpoint
from agentrl.controller.run_dir import RunDir
from agentrl.data.attempt_files import FOLDER
from agentrl.data.checkpoint_files import stored_file
from agentrl.data.failures import FailureTable
from agentrl.data.folder_index import index_folder
from agentrl.data.trajectories import encode, write_parquet
from agentrl.tracking.attempts import FailedAttempt
from agentrl.tracking.metrics import MetricsFile, StepRecord
from agentrl.tracking.seals import LINE_FILES, last_checksum, sealed_document
from agentrl.tracking.unwritten import AppendedFile
from agentrl.types import Failure, Outcome
from parts.trajectories import Rows, make_trajectory, play, stored

STALENESS = 1
GROUPS = 2
CONFIG = "model: {path: model}\ndata: {train_files: [train.parquet], val_files: [val.parquet]}\n"


def step_file(folder: Path, step: int, kind: str = "trajectories") -> Path:
    return folder / f"{kind}/step_{step:06d}.parquet"


class Writer:
    """The run in a folder; each verb writes what a run writes then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dir = RunDir.open(TrainerConfig(run_dir=str(folder)), CONFIG)
        journal = Journal(folder / FILE)
        journal.set_fact("max_staleness", str(STALENESS))
        self.buffer = ReplayBuffer(
            Rows(),
            LedgerRules(groups_per_step=GROUPS, max_staleness=STALENESS, group_size=2),
            folder / FOLDER,
            journal=journal,
        )
        self.version = -1
        self.metrics = MetricsFile(folder / "metrics.jsonl")

    def publish(self, step: int) -> None:
        self.version += 1
        self.dir.journal_version(self.version, step=step, what="policy")
        self.buffer.advance(self.version, step)

    def play_all(self) -> None:
        for lease in self.buffer.lease("a", 99, 0.0):
            played = (play(lease, member, reward=float(member)) for member in range(2))
            self.buffer.add("a", stored(*played, folder=self.folder / FOLDER))

    def learn(self, step: int) -> None:
        self.play_all()
        batch = [attempt.load() for attempt in self.buffer.take(GROUPS, 0.0, step)]
        write_parquet(step_file(self.folder, step), encode(batch), step=step, learned_by=self.version)
        self.publish(step)
        values = {"rollout/trajectories": float(len(batch)), "attempts/failed": 1.0, "alarms/raised": 1.0}
        self.metrics.log(StepRecord("train", step, self.version, float(step), values))

    def validate(self, step: int) -> None:
        played = [make_trajectory([-1, 0], group_id=g, task_id=f"v:{g}", reward=1.0) for g in range(3)]
        write_parquet(step_file(self.folder, step, "validation"), encode(played), step=step)
        values = {"val/trajectories": float(len(played)), "val/accuracy": 0.5}
        self.metrics.log(StepRecord("validation", step, self.version, float(step), values))
        self.dir.write_validations({"final": {**values, "val/step": step}})

    def go_back(self, step: int) -> None:
        self.play_all()
        self.buffer.roll_back(step)
        self.metrics.go_back(step)
        self.publish(step)

    def save(self, step: int) -> None:
        def write(name: str, folder: str):
            file = Path(folder) / name
            file.write_text(json.dumps({"model": "tiny", "step": step}))
            return [stored_file(Path(folder), file)]

        save_checkpoint(
            self.dir.checkpoints,
            step=step,
            version=self.version,
            save_learner=partial(write, "model.json"),
            buffer_state=self.buffer.state(),
            keep_last=2,
        )
        self.buffer.settle(step)

    def end(self, step: int) -> None:
        failure = FailedAttempt(
            Failure("no luck", None, "KeyError", "mine.py:3", ""),
            outcome=Outcome.TOOL_ERROR,
            became="retried",
            time=1.7e9,
            task_id="t:1",
            data_source="s",
            agent_name="a",
            group_id=1,
            member=0,
            version=1,
        )
        table = FailureTable(self.folder / "failures.parquet", keeps_earlier=False)
        table.add([failure], step=step)
        table.write(is_last=True)
        alarms = AppendedFile(self.folder / "alarms.jsonl")
        alarm = {"rule": "ess_low", "metric": "ess", "value": 0.1, "bound": 0.5, "advice": "wait"}
        alarms.append_records(*(json.dumps({"step": s, "event": "raised", **alarm}).encode() for s in (1, 2)))
        alarms.close()
        (self.folder / "policy").mkdir()
        (self.folder / "policy/model.safetensors").write_bytes(bytes(range(256)))
        index_folder(self.folder / "policy")
        counts = self.buffer.counts()
        told = asdict(counts)
        ends = {name: last_checksum(self.folder / name) for name in LINE_FILES}
        (self.folder / "result.json").write_text(
            sealed_document({"step": step, "version": self.version, "counts": told, "ends": ends})
        )
        self.metrics.close()
        self.buffer.close()
        self.dir.close()


def write_whole_run(folder: Path) -> Path:
    """Write a finished run of four steps; the last two are made twice, because the run went back."""
    writer = Writer(folder)
    writer.publish(0)
    for step in (1, 2, 3, 4):
        writer.learn(step)
        if step == 1:
            writer.save(1)
    writer.go_back(2)
    for step in (3, 4):
        writer.learn(step)
    writer.validate(4)
    writer.save(4)
    writer.end(4)
    return folder
