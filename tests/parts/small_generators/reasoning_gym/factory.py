"""`DATASETS` and `create_dataset`, as in reasoning-gym 0.1.25."""

from dataclasses import dataclass

from reasoning_gym.games import PuzzleGenerator
from reasoning_gym.hashed import HashedGenerator
from reasoning_gym.sums import SumGenerator
from reasoning_gym.unread import UnreadGenerator


@dataclass
class SumConfig:
    seed: int = 0
    size: int = 500
    largest: int = 99

    def validate(self):
        assert self.largest > 0, "largest must be positive"


DATASETS = {
    "sums": (SumGenerator, SumConfig),
    "puzzle24": (PuzzleGenerator, SumConfig),
    "hashed": (HashedGenerator, SumConfig),
    "unread": (UnreadGenerator, SumConfig),
    "composite": (SumGenerator, SumConfig),
}


def create_dataset(name, **kwargs):
    dataset_class, config_class = DATASETS[name]
    config = config_class(**kwargs)
    config.validate()
    return dataset_class(config)
