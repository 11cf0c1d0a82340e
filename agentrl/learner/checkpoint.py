"""State of the learner by torch.distributed.checkpoint: every rank writes its shards, and any world size reads them.

The folder is written in place; that it appears whole or not at all is the caller's part (it holds more than the learner).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from agentrl.errors import CheckpointError
from agentrl.learner.model import Policy
from agentrl.learner.ranks import Place
from agentrl.learner.step import Stepper

_FAILURES = (CheckpointException, OSError, RuntimeError, ValueError, KeyError)


def save(policy: Policy, stepper: Stepper, place: Place, folder: Path) -> None:
    """Write model, optimizer, update count and each rank's random state. A collective.

    Raises:
        CheckpointError: it could not be written.
    """
    try:
        dcp.save(_state(policy, stepper), checkpoint_id=str(folder))
        torch.save(_random_state(place), _random_file(folder, place.rank))
    except _FAILURES as error:
        raise CheckpointError(f"the learner's checkpoint could not be written to {folder}: {error}") from error


def load(policy: Policy, stepper: Stepper, place: Place, folder: Path) -> None:
    """Read what `save` wrote, at this or another world size. A collective.

    A rank that has no random state there (more ranks than before) keeps its own.

    Raises:
        CheckpointError: it is missing, incomplete, or of another model.
    """
    state = _state(policy, stepper)
    try:
        dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(policy.module, stepper.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if _random_file(folder, place.rank).is_file():
            _set_random_state(torch.load(_random_file(folder, place.rank), weights_only=True), place)
    except _FAILURES as error:
        raise CheckpointError(f"the learner's checkpoint at {folder} could not be read: {error}") from error
    stepper.num_updates = int(state["progress"]["num_updates"])
    stepper.num_non_finite = int(state["progress"]["num_non_finite"])


def _state(policy: Policy, stepper: Stepper) -> dict[str, Any]:
    model, optimizer = get_state_dict(policy.module, stepper.optimizer)
    progress = {"num_updates": torch.tensor(stepper.num_updates), "num_non_finite": torch.tensor(stepper.num_non_finite)}
    return {"model": model, "optimizer": optimizer, "progress": progress}


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_state_rank{rank}.pt"


def _random_state(place: Place) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(place.device)} if place.device.type == "cuda" else {})


def _set_random_state(state: dict[str, torch.Tensor], place: Place) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and place.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], place.device)
