"""An uploaded run: what is where in object storage, who may write there, and how it comes back.

```
URL/
  upload.json             `UploadIndex`: written last, names everything else with size and hash
  checkpoints/step_000020_1a2b3c4d/    as in the run folder, manifest.json last; named by its hash
  journal/step_000020_5e6f7a8b.sqlite  the replay buffer's journal when that checkpoint was the newest
  attempts/               files of the attempts that this journal refers to
  opponents/              the policies that opponents are after that checkpoint's step
  trajectories/ validation/ proximal/ policy/ metrics.jsonl versions.jsonl ...
```

Checkpoints and journals never change under their names, and are compared with their hashes. The other files
may be newer than the index: they are replaced while the run goes on.

One run folder at a time owns an upload: the one whose random name is in the index. A run folder without state
takes it over; a folder with state of its own never does.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError, model_validator

from agentrl.buffer.checksums import WriteCount
from agentrl.buffer.journal import FILE as JOURNAL
from agentrl.buffer.records import Records, count_path
from agentrl.config.storage_urls import shown
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.run_dir import RunDir
from agentrl.data.atomic_files import require_new_folder, sync, write_atomically
from agentrl.data.attempt_files import FOLDER as ATTEMPTS
from agentrl.data.checkpoint_files import MANIFEST
from agentrl.data.folder_index import below, problem_of_name
from agentrl.data.image_files import FOLDER as IMAGES
from agentrl.errors import ConfigError, StorageError
from agentrl.extras.opponents.refresh import FOLDER as OPPONENTS
from agentrl.extras.storage.fetched import fetch_checkpoint
from agentrl.extras.storage.storage import StoragePath
from agentrl.tracking.unwritten import AppendedFile
from agentrl.tracking.versions import VERSIONS, read_versions

INDEX = "upload.json"
"""Name of the index in storage, and of its copy in the run folder that owns it."""
CHECKPOINTS = "checkpoints"
LEFT_THERE = ("trajectories/", "validation/", "proximal/", "policy/", "journal/")
"""What a resumed run does not need: it stays in storage."""
VERSIONS_SKIPPED = 1000
"""More versions than a run publishes between two uploads: none of them is published a second time."""

_FETCHING = ".fetching"
"""Marks a run folder into which an upload is being fetched: it has no state of its own yet."""


FILES = (
    *("config.yaml", "metrics.jsonl", "versions.jsonl", "validations.json", "alarms.jsonl"),
    *("failures.parquet", "readiness.txt", "result.json", "summary.md", "report.png"),
)
"""Files of a run folder that are uploaded, if they are there."""
FOLDERS = (
    *("trajectories", "validation", "proximal", "policy", "alarms", "watchdog"),
    *(IMAGES, ATTEMPTS, OPPONENTS, "journal"),
)
"""Folders of an upload, beside that of the checkpoints."""
MAX_INDEX_BYTES = 1 << 28

_CHECKPOINT = re.compile(r"step_(\d{6,12})_[0-9a-f]{8}")
_Stored = tuple[Annotated[int, Field(ge=0, lt=1 << 63)], Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]]


class UploadIndex(BaseModel):
    """The content of upload.json, which anyone may have written who can write there.

    owner: random name of the run folder that writes here. host, time: for people.
    checkpoints: name of the folder -> bytes, sha256 of its manifest. newest: name and step of the newest one.
    journal: the file that belongs to it.
    files: all other files, path -> bytes, sha256 when they were sent.
    """

    format: int = 1
    owner: str
    host: str = ""
    time: str = ""
    newest: tuple[str, int] | None = None
    checkpoints: dict[str, _Stored] = {}
    journal: str | None = None
    files: dict[str, _Stored] = {}

    @model_validator(mode="after")
    def _names_only_what_a_run_uploads(self) -> UploadIndex:
        for name in self.checkpoints:
            if not _CHECKPOINT.fullmatch(name):
                raise ValueError(f"{name[:100]!r} is not the name of a checkpoint")
        for name in self.files:
            if problem := problem_of_name(name):
                raise ValueError(problem)
            if name not in FILES and name.partition("/")[0] not in (FOLDERS if "/" in name else ()):
                raise ValueError(f"{name[:100]!r} is no file of a run")
        if self.newest is not None:
            name, step = self.newest
            if name not in self.checkpoints or not name.startswith(f"step_{step:06d}_"):
                raise ValueError(f"newest={self.newest!r} is none of the checkpoints")
        if self.journal not in (None, *(name for name in self.files if name.startswith("journal/"))):
            raise ValueError(f"journal={self.journal!r} is none of the files")
        return self

    @property
    def step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return None if self.newest is None else self.newest[1]

    def now(self) -> UploadIndex:
        """Return the index with the current host and time."""
        time = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        return self.model_copy(update={"host": socket.gethostname(), "time": time})

    def to_json(self) -> str:
        return json.dumps(self.model_dump(), indent=1)


def read_upload(place: StoragePath) -> UploadIndex | None:
    """Return the index of the run at `place`; None if there is none.

    Raises:
        ConfigError: it was not written by this version.
        StorageError: it cannot be read.
    """
    if ((place / INDEX).size() or 0) > MAX_INDEX_BYTES:
        raise ConfigError(f"{place / INDEX} is larger than {MAX_INDEX_BYTES:,} bytes: no index of a run")
    content = (place / INDEX).read()
    if content is None:
        return None
    try:
        index = UploadIndex.model_validate_json(content)
    except ValidationError as error:
        reason = " ".join(error.errors()[0]["msg"].split())[:200]
        raise ConfigError(
            f"{place / INDEX} is not the index of an uploaded run ({reason}); choose another URL"
        ) from error
    if index.format != 1:
        raise ConfigError(f"{place / INDEX} has format {index.format}, this version reads 1")
    return index


def claim_upload(
    place: StoragePath, run_dir: RunDir, trainer: TrainerConfig, *, say: Callable[[str], None]
) -> UploadIndex:
    """Make the run folder the owner of the upload at `place`, and return the index.

    An upload that another run folder owned is fetched first, if this folder has no state of its own: the
    newest checkpoint, its journal and the small files.

    Raises:
        ConfigError: `place` cannot be written, or contains a run that this folder must not continue.
        StorageError: the upload cannot be fetched.
    """
    place.probe()
    index, own = read_upload(place), own_index(run_dir.root)
    if index is None:
        index = UploadIndex(owner=uuid.uuid4().hex)
    elif own is None or own.owner != index.owner:
        _refuse_foreign(index, place, run_dir, trainer)
        fetch_upload(place, index, run_dir.root, say=say)
        index = index.model_copy(update={"owner": uuid.uuid4().hex})
    write_index(place, index, run_dir.root)
    (run_dir.root / _FETCHING).unlink(missing_ok=True)
    return index


def write_index(place: StoragePath, index: UploadIndex, root: Path) -> None:
    """Write the index into storage, and its copy into the run folder.

    Raises:
        StorageError, DiskError: it could not be written.
    """
    text = index.now().to_json()
    (place / INDEX).write(text.encode())
    write_atomically(root / INDEX, text)


def fetch_upload(place: StoragePath, index: UploadIndex, root: Path, *, say: Callable[[str], None]) -> None:
    """Fetch what a run needs to resume into its folder. The folder counts as empty until the index is there.

    Raises:
        StorageError: a file cannot be read, or is damaged.
    """
    assert index.newest is not None, "see _refuse_foreign"
    (root / _FETCHING).touch()
    name, step = index.newest
    num_bytes = index.checkpoints[name][0]
    what = f"{local_name(name)} ({num_bytes / 1e9:,.2f} GB)"
    say(f"fetching {what} from {place}, as {index.host} left it at {index.time}")
    for path in index.files:
        if not path.startswith(LEFT_THERE) and path != "config.yaml":
            (place / path).download(below(root, path))
    _fetch_journal(place, index, root)
    _skip_versions(root / VERSIONS, step)
    target = below(root / CHECKPOINTS, local_name(name))
    if not target.is_dir():
        _fetch_checkpoint(place, index, name, target)


def fetch_run(url: str, folder: Path, *, say: Callable[[str], None]) -> UploadIndex:
    """Fetch a whole uploaded run into a new folder: all checkpoints, trajectories and other files.

    Raises:
        ConfigError: there is no run at `url`, or `folder` is not empty.
        StorageError: a file cannot be read, or is damaged.
    """
    require_new_folder(folder)
    place = StoragePath.of(url)
    index = read_upload(place)
    if index is None:
        raise ConfigError(f"{str(place)!r} contains no uploaded run: it has no {INDEX}")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for path in index.files:
            if not path.startswith("journal/"):
                (place / path).download(below(partial, path))
        _fetch_journal(place, index, partial)
        for name in index.checkpoints:
            say(f"fetching {local_name(name)} ({index.checkpoints[name][0] / 1e9:,.2f} GB)")
            _fetch_checkpoint(place, index, name, below(partial / CHECKPOINTS, local_name(name)))
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return index


def disk_lines(where: str) -> list[str]:
    """Return how many bytes of a run are where: lines for a run folder or the URL of an upload.

    Raises:
        ConfigError: there is no run.
    """
    if "://" in where:
        place = StoragePath.of(where)
        index = read_upload(place)
        if index is None:
            raise ConfigError(f"{str(place)!r} contains no uploaded run: it has no {INDEX}")
        return [_headline(str(place), index), *_table({}, _sizes(index))]
    root = Path(where)
    if not (root / "config.yaml").is_file():
        raise ConfigError(f"{where!r} is not the folder of a run: it has no config.yaml")
    local: dict[str, int] = {}
    for path in root.rglob("*"):
        if path.is_file():
            kind = _kind(str(path.relative_to(root)))
            local[kind] = local.get(kind, 0) + path.stat().st_size
    index = own_index(root)
    headline = [] if index is None else [_headline("uploaded", index)]
    return [*headline, *_table(local, {} if index is None else _sizes(index))]


def _headline(what: str, index: UploadIndex) -> str:
    step = "no checkpoint" if index.step is None else f"step {index.step}"
    return f"{what}: {step}, by {index.host} at {index.time}"


def _sizes(index: UploadIndex) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path, (num_bytes, _) in index.files.items():
        sizes[_kind(path)] = sizes.get(_kind(path), 0) + num_bytes
    for num_bytes, _ in index.checkpoints.values():
        sizes[CHECKPOINTS] = sizes.get(CHECKPOINTS, 0) + num_bytes
    return sizes


def _kind(path: str) -> str:
    if path.startswith(JOURNAL):
        return "journal"
    return path.partition("/")[0] if "/" in path else "other files"


def _table(local: Mapping[str, int], uploaded: Mapping[str, int]) -> list[str]:
    """Return lines: kind of file, MB on this machine, MB uploaded."""
    kinds = sorted({*local, *uploaded}, key=lambda kind: -max(local.get(kind, 0), uploaded.get(kind, 0)))
    rows = [(kind, local.get(kind, 0), uploaded.get(kind, 0)) for kind in kinds]
    rows.append(("total", sum(local.values()), sum(uploaded.values())))
    return [f"{'':16} {'here, MB':>12} {'uploaded, MB':>14}"] + [
        f"{kind:16} {here / 1e6:12,.1f} {there / 1e6:14,.1f}" for kind, here, there in rows
    ]


def own_index(root: Path) -> UploadIndex | None:
    """Return the run folder's copy of the index; None if it never uploaded."""
    try:
        return UploadIndex.model_validate_json((root / INDEX).read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ConfigError(f"{root / INDEX} is damaged; remove it, or choose another folder") from error


def _refuse_foreign(index: UploadIndex, place: StoragePath, run_dir: RunDir, trainer: TrainerConfig) -> None:
    """Raise ConfigError unless this folder may continue a run that another folder uploaded."""
    whose = (
        f"trainer.upload_to={shown(place.url)!r} contains a run that {index.host} uploaded at {index.time}"
    )
    other = "choose another trainer.upload_to"
    is_fetching = (run_dir.root / _FETCHING).exists()
    checkpoints = list(run_dir.checkpoints.glob("step_*"))
    if not is_fetching and (checkpoints or (run_dir.root / JOURNAL).exists()):
        raise ConfigError(
            f"{whose} from another run folder, and {str(run_dir.root)!r} has a run of its own; {other}, or "
            "move this folder away to continue the uploaded run"
        )
    if trainer.resume_mode != "auto":
        raise ConfigError(
            f"{whose}, and trainer.resume_mode={trainer.resume_mode!r} would not continue it; {other}"
        )
    if index.newest is None:
        raise ConfigError(f"{whose}; it has no checkpoint (trainer.save_freq) to continue from; {other}")


def _fetch_journal(place: StoragePath, index: UploadIndex, root: Path) -> None:
    if index.journal is not None:
        (place / index.journal).download(root / JOURNAL, expected=index.files[index.journal])
        with Records.open(root / JOURNAL) as records:
            count = WriteCount(count_path(root / JOURNAL))  # its hash has shown that nothing is missing
            count.write(records.head().num_writes)
            count.close()


def _fetch_checkpoint(place: StoragePath, index: UploadIndex, name: str, target: Path) -> None:
    manifest = (place / CHECKPOINTS / name / MANIFEST).read()
    if manifest is None or hashlib.sha256(manifest).hexdigest() != index.checkpoints[name][1]:
        what = "no" if manifest is None else "another"
        raise StorageError(f"{place / CHECKPOINTS / name} has {what} {MANIFEST}; the upload is damaged")
    fetch_checkpoint(place / CHECKPOINTS / name, manifest, target)


def stored_name(name: str, sha256: str) -> str:
    """Return the name in storage of a checkpoint, or of its journal, with the hash of its content."""
    return f"{name}_{sha256[:8]}"


def local_name(name: str) -> str:
    """Return the name in a run folder of a checkpoint in storage."""
    return name.rpartition("_")[0]


def _skip_versions(file: Path, step: int) -> None:
    """Let the next version be one that the lost machine cannot have published since its last upload."""
    newest = max((one.version for one in read_versions(file)), default=-1)
    record = {"version": newest + VERSIONS_SKIPPED, "step": step, "what": "resumed from the upload"}
    appended = AppendedFile(file)
    appended.append_records(json.dumps(record).encode())
    sync(file)
    appended.close()
