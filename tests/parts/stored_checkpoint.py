"""A checkpoint of a tiny model, as a run writes it, and what somebody may do to its files."""

import hashlib
import json
import os
from pathlib import Path

from agentrl.chat.tiny import build_tiny_tokenizer, write_tiny_tokenizer
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.trainer import TrainerConfig
from agentrl.controller.saving import CheckpointWriter
from agentrl.learner.learner import LearnerSpec
from parts.learner import learner_spec, lone_learner, update_once, write_tiny_model

VOCABULARY = build_tiny_tokenizer().get_vocab_size(with_added_tokens=True)


class Opening:
    """A pickle of it makes a folder where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def write_base(folder: Path) -> Path:
    write_tiny_tokenizer(folder)
    write_tiny_model(folder, VOCABULARY)
    return folder


def spec_of(base: Path, **changes) -> LearnerSpec:
    return learner_spec(ModelConfig(path=str(base), **changes), learner=LearnerConfig(), temperature=1.0)


def write_checkpoint(base: Path, folder: Path, **changes) -> Path:
    """Update a model once, and return its checkpoint in `folder`. changes: of its ModelConfig."""
    with lone_learner(spec_of(base, **changes)) as learner:
        update_once(learner, VOCABULARY)
        writer = CheckpointWriter(folder, TrainerConfig())
        writer.save(learner, step=1, version=1, buffer_state=b"", metric=None)
        writer.finish()
        writer.close()
    return folder / "step_000001"


def sign(checkpoint: Path) -> None:
    """Write the hashes of the files as they are, as somebody does who changes them on purpose."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = [len(data), hashlib.sha256(data).hexdigest()]
    del manifest["checksum"]  # whoever writes such a file needs none
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
