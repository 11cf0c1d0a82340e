"""`RunUpload`: copies a run to object storage in the background.

A thread compares the run folder with the index of the upload and sends what is missing, so it needs no memory
of what it did: after a kill it continues. The run never waits for it, except at its end. Of several complete
checkpoints the newest goes first, and it is not removed while it is sent.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType

from agentrl.buffer.journal import FILE as JOURNAL
from agentrl.buffer.records import Records
from agentrl.controller.checkpoint import Checkpoint, complete_checkpoints
from agentrl.controller.run_dir import RunDir
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import FOLDER as ATTEMPTS
from agentrl.data.attempt_files import TrajectoryRef
from agentrl.data.checkpoint_files import MANIFEST, read_manifest
from agentrl.data.image_files import FOLDER as IMAGES
from agentrl.errors import AgentRLError, StorageError
from agentrl.extras.opponents.refresh import FOLDER as OPPONENTS
from agentrl.extras.storage.storage import StoragePath
from agentrl.extras.storage.uploaded import (
    CHECKPOINTS,
    FILES,
    UploadIndex,
    read_upload,
    stored_name,
    write_index,
)
from agentrl.tracking.unwritten import UnwrittenFiles

STREAMS = 4
"""Files of a checkpoint that are sent at once."""
PATIENCE_S = 600.0
"""Seconds for which a finished run tries to upload the rest while the storage fails."""
RETRY_S = 5.0
COPY_ATTEMPTS = 10
LEAVE_S = 5.0
"""Seconds for which a run that failed waits for the end of a request."""

_JOURNAL_COPY = ".journal_copy"
_FAILURES = (AgentRLError, OSError, sqlite3.Error)


class RunUpload:
    """The copy of a run in object storage. Use it as a context manager: at the end of a run that succeeded,
    it waits until everything is there.
    """

    def __init__(
        self,
        place: StoragePath,
        index: UploadIndex,
        run_dir: RunDir,
        *,
        interval_s: float,
        say: Callable[[str], None],
        snapshots: Callable[[int], Collection[Path]] = lambda step: (),
    ) -> None:
        """index: as `claim_upload` returns it. snapshots: returns the folders of the run that a resume after
        a step needs for its opponents (see `needed_snapshots`).
        """
        self._place, self._index, self._dir = place, index, run_dir
        self._snapshots = snapshots
        self._interval_s = interval_s
        self._say = say
        self._unwritten = UnwrittenFiles(say)
        self._sent: dict[str, tuple[int, int]] = {}  # name -> size and time of the local file that was sent
        self._pinned: str | None = None
        # By folder, the files in storage that belong to the newest checkpoint there; once they are known.
        self._needed: dict[str, set[str]] = {}
        self._written: UploadIndex | None = index
        self._is_lost = False
        self._has_looked = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    def __enter__(self) -> RunUpload:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(None if kind is None else LEAVE_S)
        if kind is None:
            self._finish()

    def pinned(self) -> Collection[str]:
        """Return the names of the checkpoints that must not be removed now."""
        return [self._pinned] if self._pinned is not None else []

    def metrics(self) -> dict[str, float]:
        """Return how many checkpoints on disk are newer than the newest in storage."""
        uploaded = "" if self._index.step is None else f"step_{self._index.step:06d}"
        behind = sum(folder.name > uploaded for folder in self._dir.checkpoints.glob("step_*"))
        return {"upload/checkpoints_behind": float(behind)}

    # ----------------------------------------------------------------------------------------------- one pass

    def send(self, *, is_last: bool = False) -> None:
        """Send everything that is complete and not there yet, and remove checkpoints that the run removed.

        Args:
            is_last: the run has ended: send its journal as it is now.

        Raises:
            StorageError: the storage failed, or another run folder took the upload over.
            _Stopped: `__exit__` was called.
        """
        self._check_owner()
        self._send_files()
        while (name := self._newest_missing()) is not None:
            self._send_checkpoint(name)
        if is_last and self._index.step is not None:
            self._send_journal(self._copied_journal(), self._index.step)
        self._send_files()
        self._remove_old()

    def _check_owner(self) -> None:
        index = read_upload(self._place)
        if index is not None and index.owner != self._index.owner:
            self._is_lost = True
            raise StorageError(
                f"{self._place} was taken over by a run on {index.host} at {index.time}; nothing more is "
                "uploaded from here. Two runs go on from one checkpoint: stop one of them"
            )

    def _newest_missing(self) -> str | None:
        """Return the newest complete checkpoint that is not in storage."""
        for checkpoint in reversed(complete_checkpoints(self._dir.checkpoints)):
            if self._stored(checkpoint) not in self._index.checkpoints:
                return checkpoint.folder.name
        return None

    def _stored(self, checkpoint: Checkpoint) -> str:
        return stored_name(checkpoint.folder.name, _sha256(checkpoint.folder / MANIFEST))

    def _send_checkpoint(self, name: str) -> None:
        folder = self._dir.checkpoints / name
        self._pinned = name
        try:
            manifest, sha256 = read_manifest(folder), _sha256(folder / MANIFEST)
            is_newest = name == complete_checkpoints(self._dir.checkpoints)[-1].folder.name
            # Copied now: later the journal would no longer go back to this checkpoint.
            journal = self._copied_journal() if is_newest else None
            place = self._place / CHECKPOINTS / stored_name(name, sha256)
            with ThreadPoolExecutor(STREAMS, thread_name_prefix="upload") as pool:
                sent = [
                    pool.submit(self._send_verified, folder / path, place / path, expected)
                    for path, expected in manifest.files.items()
                ]
                for future in sent:
                    future.result()
            (place / MANIFEST).upload(folder / MANIFEST)
        finally:
            self._pinned = None
        size = sum(num_bytes for num_bytes, _ in manifest.files.values())
        checkpoints = {**self._index.checkpoints, place.name: (size, sha256)}
        if is_newest:
            self._send_journal(journal, manifest.step)
            self._send_snapshots(manifest.step)
            self._set(checkpoints=checkpoints, newest=(place.name, manifest.step))
            self._send_files()  # with versions.jsonl, which must have all versions of the journal
        else:
            self._set(checkpoints=checkpoints)
        self._write_index()

    def _send_verified(self, file: Path, place: StoragePath, expected: tuple[int, str]) -> None:
        """Send a file of a checkpoint, whose bytes must have the hash that the rank wrote.

        A file of the same size is there already: an interrupted upload of the same checkpoint sent it.
        """
        self._raise_if_stopped()
        if place.size() == expected[0]:
            return
        if place.upload(file) != expected:
            place.delete()
            raise StorageError(f"{file} was changed since it was written; the checkpoint is not uploaded")

    def _send_files(self) -> None:
        """Send all files that changed, and the index."""
        for name, path in self._files():
            self._raise_if_stopped()
            with suppress(FileNotFoundError):  # removed meanwhile
                status = path.stat()
                identity = (status.st_size, status.st_mtime_ns)
                if self._sent.get(name) == identity:
                    continue
                known = self._index.files.get(name)
                if known is None or known[0] != status.st_size or known[1] != _sha256(path):
                    self._set(files={**self._index.files, name: (self._place / name).upload(path)})
                self._sent[name] = identity
        self._write_index()

    def _files(self) -> Iterator[tuple[str, Path]]:
        root = self._dir.root
        yield from ((name, root / name) for name in FILES if (root / name).is_file())
        folders = {
            "trajectories": self._dir.rollout_data,
            "validation": self._dir.validation_data,
            "proximal": self._dir.proximal,
            IMAGES: self._dir.images,
            **{name: root / name for name in ("alarms", "watchdog", "policy")},
        }
        for name, folder in folders.items():
            for path in sorted(folder.rglob("*")):
                if path.is_file() and not path.name.endswith(".partial"):
                    yield f"{name}/{path.relative_to(folder)}", path

    def _copied_journal(self) -> Path | None:
        """Return a copy of the journal, a snapshot of one moment; None if the run has none.

        Beside it are links to the files of the attempts that it refers to: the run may remove its own.

        Raises:
            StorageError: files are removed faster than they are linked.
        """
        source = self._dir.root / JOURNAL
        folder = self._dir.root / _JOURNAL_COPY
        if not source.is_file():
            return None
        for _ in range(COPY_ATTEMPTS):
            shutil.rmtree(folder, ignore_errors=True)
            (folder / ATTEMPTS).mkdir(parents=True)
            with (
                closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as reading,
                closing(sqlite3.connect(folder / JOURNAL)) as writing,
            ):
                writing.execute("PRAGMA synchronous = OFF")  # it is sent at once, or made again
                reading.backup(writing)
                writing.execute("PRAGMA journal_mode = DELETE")  # one file, without a log
            try:
                for file in _attempt_files(folder / JOURNAL, self._dir.root / ATTEMPTS):
                    _link(file, folder / ATTEMPTS / file.name)
            except FileNotFoundError:
                continue
            return folder
        raise StorageError(f"{source} changes faster than it is copied; it is tried again")

    def _send_journal(self, copy: Path | None, step: int) -> None:
        """Send a copy of the journal and the attempts that it refers to, and remove the copy."""
        if copy is None:
            return
        try:
            self._send_unchanging(ATTEMPTS, copy, (copy / ATTEMPTS).iterdir())
            name = f"journal/{stored_name(f'step_{step:06d}', _sha256(copy / JOURNAL))}.sqlite"
            sent = (self._place / name).upload(copy / JOURNAL)
        finally:
            shutil.rmtree(copy, ignore_errors=True)
        self._set(files={**self._index.files, name: sent}, journal=name)

    def _send_snapshots(self, step: int) -> None:
        """Send the policies that opponents are when a run resumes after `step`."""
        files = (file for folder in self._snapshots(step) for file in folder.rglob("*") if file.is_file())
        self._send_unchanging(OPPONENTS, self._dir.root, files)

    def _send_unchanging(self, kind: str, root: Path, files: Iterable[Path]) -> None:
        """Send files of the folder `kind` of `root` that are not there yet. The others are not needed
        anymore.
        """
        needed = {str(file.relative_to(root)): file for file in files}
        for name, file in needed.items():
            self._raise_if_stopped()
            if name not in self._index.files:
                self._set(files={**self._index.files, name: (self._place / name).upload(file)})
        self._needed[kind] = {*needed}

    def _remove_old(self) -> None:
        """Remove checkpoints that the run removed, and what belongs to older checkpoints."""
        kept = {self._stored(checkpoint) for checkpoint in complete_checkpoints(self._dir.checkpoints)}
        kept |= {self._index.newest[0]} if self._index.newest is not None else set()
        old = [name for name in self._index.checkpoints if name not in kept]
        if not self._has_looked:  # what an interrupted upload left
            there = {name.partition("/")[0] for name in (self._place / CHECKPOINTS).files()}
            old += [name for name in there - kept if name not in old]
            self._has_looked = True
        needed: dict[str, Collection[str | None]] = {"journal": {self._index.journal}, **self._needed}
        files = [
            name
            for name in self._index.files
            if (kind := name.partition("/")[0]) in needed and name not in needed[kind]
        ]
        if not old and not files:
            return
        # First out of the index, then out of the storage: the index never names what is not there.
        self._set(
            checkpoints={n: found for n, found in self._index.checkpoints.items() if n not in old},
            files={n: found for n, found in self._index.files.items() if n not in files},
        )
        self._write_index()
        for name in old:
            (self._place / CHECKPOINTS / name / MANIFEST).delete()
            (self._place / CHECKPOINTS / name).delete_folder()
        for name in files:
            (self._place / name).delete()

    def _set(self, **fields: object) -> None:
        self._index = self._index.model_copy(update=fields)

    def _write_index(self) -> None:
        if self._index != self._written:
            write_index(self._place, self._index, self._dir.root)
            self._written = self._index

    # ------------------------------------------------------------------------------------------------- thread

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s) and not self._is_lost:
            try:
                self.send()
            except _Stopped:
                return
            except _FAILURES as error:
                self._unwritten.count("upload", error)
            else:
                self._unwritten.clear("upload")

    def _finish(self) -> None:
        """Upload the rest; raise StorageError if the storage fails for PATIENCE_S."""
        if self._is_lost:
            return
        self._stop.clear()
        self._say(f"uploading the rest to {self._place}")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.send(is_last=True)
                self._unwritten.clear("upload")
                return
            except _FAILURES as error:
                if self._is_lost or time.monotonic() > deadline:
                    raise StorageError(f"{error}; the same command uploads the rest") from error
                self._unwritten.count("upload", error)
            self._stop.wait(RETRY_S)

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise _Stopped


def _attempt_files(journal: Path, folder: Path) -> set[Path]:
    """Return the files in which the attempts of a journal are stored. folder: of these files."""
    with Records.open(journal) as records:
        facts = [AttemptFacts.from_json(records.data_of(one), folder) for one in records.stored()]
    return {Path(one.source.path) for one in facts if isinstance(one.source, TrajectoryRef)}


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


class _Stopped(Exception):
    """The run ends: the next one continues the upload."""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
