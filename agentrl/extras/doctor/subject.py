"""`Subject`: what is examined."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.config.model_size import ModelSize
from agentrl.config.schema import Config


@dataclass(frozen=True, slots=True)
class Subject:
    """A machine, and the config of the run that is to work on it.

    is_given: the user named a config; False: `config` has only defaults, and what it alone would need is not
        examined.
    """

    config: Config
    is_given: bool

    @property
    def run_folder(self) -> Path:
        """The run folder; without a config, the working directory."""
        trainer = self.config.trainer
        if trainer.run_dir:
            return Path(trainer.run_dir)
        return Path("runs") / trainer.project_name / trainer.experiment_name if self.is_given else Path.cwd()

    @property
    def weights_folder(self) -> Path:
        """The folder of the disk transport."""
        folder = self.config.rollout.weights.folder
        return Path(folder) if folder else self.run_folder / "weights"

    @property
    def model_folder(self) -> Path | None:
        """The model, if it is a folder of this machine."""
        return model_folder(self.config.model.path)

    @property
    def num_parameters(self) -> int | None:
        """Parameters of the model; None: it is not at hand, or of an unknown type."""
        folder = self.model_folder
        size = ModelSize.read(str(folder)) if folder is not None else None
        return None if size is None else size.num_parameters

    def anchored(self) -> Subject:
        """Return the same subject for a process with another working directory."""
        trainer = self.config.trainer.model_copy(update={"run_dir": str(self.run_folder.absolute())})
        weights = self.config.rollout.weights
        if weights.folder:
            weights = weights.model_copy(update={"folder": str(Path(weights.folder).absolute())})
        rollout = self.config.rollout.model_copy(update={"weights": weights})
        return replace(self, config=self.config.model_copy(update={"trainer": trainer, "rollout": rollout}))

    def as_json(self) -> str:
        """Return the subject as text. It contains no key, only names of environment variables."""
        return json.dumps({"config": self.config.model_dump_json(), "is_given": self.is_given})

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Return the subject of a text of `as_json`."""
        values = json.loads(text)
        return cls(Config.model_validate_json(values["config"]), values["is_given"])


def model_folder(path: str) -> Path | None:
    """Return a model's folder on this machine; None for a hub id or a URL, which no examination downloads."""
    return Path(path) if path and (Path(path) / "config.json").is_file() else None


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())
