"""Checkpoints of the learner: every rank writes its shards, and any world size can read them.

They are written with torch.distributed.checkpoint (DCP).

Frozen weights are not included: with a LoRA adapter, a checkpoint holds only the adapter. The folder is
written in place. The caller makes it appear complete or not at all, because it also contains other state.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from agentrl.config.model import ModelConfig
from agentrl.data.checkpoint_files import (
    BLOCK_BYTES,
    BLOCKS,
    MODEL,
    SHARD,
    HashingFile,
    StoredFile,
    stored_file,
)
from agentrl.errors import CheckpointError
from agentrl.learner.model import Policy
from agentrl.learner.ranks import RankPlace
from agentrl.learner.step import Stepper
from agentrl.learner.stored_state import PlainPlanner, PlainReader
from agentrl.learner.weights import describe

DESCRIPTION = "huggingface"
"""Folder in a checkpoint with the policy's config and tokenizer; an export needs no other model folder."""


FAILURES = (
    CheckpointException,
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    EOFError,
    pickle.UnpicklingError,
)
"""What torch raises if a checkpoint cannot be written or read."""


_COPIED = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
"""DCP's own choice if it is given neither a stager nor a writer: the loop waits for a plain copy."""


class _Live(AsyncStager):
    """Hands over the tensors themselves instead of a copy."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None


class _HashingFileSystem(FileSystem):
    """Hashes what DCP writes while it writes. `files`: by name, all that is written."""

    def __init__(self) -> None:
        self.files: dict[str, StoredFile] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = HashingFile(stream)  # type: ignore[arg-type]  # torch's annotation is io.IOBase
            yield hashing
        path = Path(path)
        self.files[path.name] = file = hashing.stored_as(path.name)
        if path.suffix == SHARD and file.num_bytes > BLOCK_BYTES:
            blocks = path.with_name(path.name + BLOCKS)
            blocks.write_bytes(hashing.block_digests())
            self.files[blocks.name] = stored_file(path.parent, blocks)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        name = Path(new_path).name
        self.files[name] = replace(self.files.pop(Path(path).name), path=name)


@dataclass(frozen=True, slots=True)
class _Save:
    """A checkpoint that is being written.

    own: files of this rank that DCP does not write. by_dcp: hashes the others.
    """

    folder: Path
    own: list[Path]
    by_dcp: _HashingFileSystem
    written: Future[Any]


class Saver:
    """Writes the learner's state in the background, one checkpoint at a time, each within `timeout_s`.

    On a GPU, a copy in the host's memory is written. On a CPU, a copy would be a second model and optimizer
    in the same memory: the tensors themselves are written, and `wait` delays the next change of them.
    """

    def __init__(self, model: ModelConfig, *, timeout_s: float) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._group: ProcessGroup | None = None
        self._saving: _Save | None = None
        # The same, while it reads live tensors. Not one attribute: `finish` runs in a thread of its own.
        self._reading: _Save | None = None

    def start(self, policy: Policy, stepper: Stepper, place: RankPlace, folder: Path) -> None:
        """Start writing model, optimizer, update count and random states as they are now. A collective.

        Raises:
            CheckpointError: it could not be written.
        """
        assert self._saving is None, "finish comes before the next start"
        if self._group is None:
            # A group of its own: the writing thread's collectives run while the learner issues others. In one
            # shared group, their order could differ between ranks, which deadlocks.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        own = self._write_own(policy, place, folder, self._group)
        writer = FileSystemWriter(folder)
        writer.fs = by_dcp = _HashingFileSystem()
        is_live = place.device.type == "cpu"
        try:
            written = dcp.async_save(
                _state(policy, stepper),
                checkpoint_id=str(folder),
                storage_writer=writer,
                process_group=self._group,
                # Given, because the writer itself is a stager too, an older and slower one.
                async_stager=_Live() if is_live else DefaultStager(_COPIED),
            )
        except FAILURES as error:
            raise _unwritten(folder, error) from error
        assert isinstance(written, Future), "the staging is not asynchronous"
        self._saving = _Save(folder, own, by_dcp, written)
        self._reading = self._saving if is_live else None

    def _write_own(self, policy: Policy, place: RankPlace, folder: Path, group: ProcessGroup) -> list[Path]:
        """Write this rank's files that are not shards, and return their paths.

        If one rank fails, all raise: otherwise the others would wait for it in the collectives that follow.
        """
        failed: OSError | RuntimeError | None = None
        own = [_random_file(folder, place.rank)]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(_random_state(place), _random_file(folder, place.rank))
            if place.is_first:
                (folder / MODEL).write_text(self._model.model_dump_json(indent=1), encoding="utf-8")
                (folder / DESCRIPTION).mkdir(exist_ok=True)
                describe(policy, self._model, folder / DESCRIPTION)
                own += [folder / MODEL, *(p for p in (folder / DESCRIPTION).rglob("*") if p.is_file())]
        except (OSError, RuntimeError) as error:  # torch.save reports I/O errors as RuntimeError
            failed = error
        num_failed = torch.tensor(int(failed is not None))
        dist.all_reduce(num_failed, group=group)
        if num_failed.item():
            raise _unwritten(folder, failed or OSError("another rank could not write its part")) from failed
        return own

    def wait(self) -> None:
        """Wait until weights and optimizer state may change. A failure to write is left to `finish`.

        Raises:
            CheckpointError: they are still being written after `timeout_s`.
        """
        if self._reading is None:
            return
        reading, self._reading = self._reading, None
        if wait([reading.written], timeout=self._timeout_s).not_done:
            raise _unwritten(reading.folder, self._late())

    def finish(self) -> list[StoredFile]:
        """Wait until all ranks have written the checkpoint begun by `start`.

        Returns this rank's files, with paths relative to the folder of the checkpoint; they are synced.

        Raises:
            CheckpointError: it could not be written.
        """
        assert self._saving is not None, "start comes before finish"
        saving, self._saving = self._saving, None
        folder = saving.folder
        try:
            saving.written.result(timeout=self._timeout_s)
            return [*(stored_file(folder, path) for path in saving.own), *saving.by_dcp.files.values()]
        except TimeoutError as error:
            raise _unwritten(folder, self._late()) from error
        except FAILURES as error:
            raise _unwritten(folder, error) from error

    def _late(self) -> TimeoutError:
        return TimeoutError(f"it took longer than learner.save_timeout_s={self._timeout_s:g}")


def _unwritten(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"the learner's checkpoint could not be written to {folder}: {reason(error)}")


def reason(error: BaseException) -> str:
    """Return one line that says what failed.

    torch combines the reports and tracebacks of all ranks in a CheckpointException, which is not an
    Exception.
    """
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {' '.join(str(cause).split())}"
    return str(error).splitlines()[0] if str(error) else repr(error)


def load(policy: Policy, stepper: Stepper, place: RankPlace, folder: Path) -> None:
    """Read what `Saver` wrote, at the same or another world size. A collective.

    A rank without a stored random state (more ranks than before) keeps its own.

    Raises:
        CheckpointError: it is missing, incomplete, or of another model.
    """
    state = _state(policy, stepper)
    try:
        dcp.load(state, storage_reader=PlainReader(folder), planner=PlainPlanner())
        set_state_dict(
            policy.module,
            stepper.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            # Frozen weights are not stored. `dcp.load` has already checked that everything else is present.
            options=StateDictOptions(strict=not policy.adapters),
        )
        if _random_file(folder, place.rank).is_file():
            _set_random_state(torch.load(_random_file(folder, place.rank), weights_only=True), place)
    except FAILURES as error:
        raise CheckpointError(
            f"the learner's checkpoint at {folder} could not be read: {reason(error)}"
        ) from error
    stepper.put_state_away()
    stepper.num_updates = int(state["progress"]["num_updates"])
    stepper.num_non_finite = int(state["progress"]["num_non_finite"])


def _state(policy: Policy, stepper: Stepper) -> dict[str, Any]:
    model, optimizer = get_state_dict(policy.module, stepper.optimizer)
    # Not with torch's ignore_frozen_params: it keeps the second name of a frozen tied weight.
    frozen = {
        name
        for name, weight in policy.module.named_parameters(remove_duplicate=False)
        if not weight.requires_grad
    }
    model = {name: value for name, value in model.items() if name not in frozen}
    progress = {
        "num_updates": torch.tensor(stepper.num_updates),
        "num_non_finite": torch.tensor(stepper.num_non_finite),
    }
    return {"model": model, "optimizer": optimizer, "progress": progress}


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_state_rank{rank}.pt"


def _random_state(place: RankPlace) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(place.device)} if place.device.type == "cuda" else {})


def _set_random_state(state: dict[str, torch.Tensor], place: RankPlace) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and place.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], place.device)
