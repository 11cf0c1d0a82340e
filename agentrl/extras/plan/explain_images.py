"""Explain what images cost: tokens and memory of the largest one, by the settings in the model's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.model import ModelConfig
from agentrl.config.schema import Config

_FILE = "preprocessor_config.json"
_BYTES_PER_PIXEL = 3 * 2 * 4
"""Three colors in float32, each twice: the processor repeats an image along the axis of time."""


@dataclass(frozen=True, slots=True)
class ImageCost:
    """The largest image of a model. cell: width and height in pixels of what one token stands for."""

    cell: int
    max_pixels: int

    @classmethod
    def of(cls, model: ModelConfig) -> ImageCost | None:
        """Read the settings of a local model; None if it does not see, or they cannot be read."""
        file = Path(model.tokenizer_path or model.path) / _FILE
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            largest = found.get("max_pixels") or found["size"]["longest_edge"]
            return cls(int(found["patch_size"]) * int(found["merge_size"]), int(largest))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # the run itself reports a broken file

    @property
    def max_tokens(self) -> int:
        return max(1, self.max_pixels // self.cell**2)


def image_lines(config: Config) -> list[tuple[str, str]]:
    """Return the line about images; empty for a model that does not see."""
    cost = ImageCost.of(config.model)
    if cost is None:
        return []
    megabytes = cost.max_pixels * _BYTES_PER_PIXEL / 1e6
    return [
        (
            "images",
            f"one takes at most {cost.max_tokens:,} tokens ({cost.cell} x {cost.cell} pixels each), and "
            f"{megabytes:,.0f} MB of pixels on its rank; the tower is not trained",
        )
    ]


def image_warnings(config: Config) -> Iterator[str]:
    """Yield a warning if an image may be longer than prompts may be, or servers may keep what a former model
    saw.
    """
    cost = ImageCost.of(config.model)
    if cost is None:
        return
    if cost.max_tokens > config.data.max_prompt_tokens:
        yield (
            f"an image may take {cost.max_tokens:,} tokens, and data.max_prompt_tokens is "
            f"{config.data.max_prompt_tokens:,}: rows with large images are left out or refused; raise it, "
            f"or lower max_pixels in {_FILE} of the model"
        )
    if config.rollout.urls:
        yield (
            "SGLang keeps what the tower of the model it began with made of images: the servers at "
            "rollout.urls must have been started with this run's model, or with SGLANG_VLM_CACHE_SIZE_MB=0 "
            "(docs/models.md)"
        )
