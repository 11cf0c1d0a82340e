"""Config of the data: where tasks come from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl.config.curriculum import CurriculumConfig
from agentrl.config.images import ImagesConfig
from agentrl.config.section import Section
from agentrl.config.storage_fields import PathsOrURLs

OverlongPrompts = Literal["filter", "truncate_left", "truncate_right", "truncate_middle", "error"]


class DataConfig(Section):
    """Where tasks come from."""

    train_files: PathsOrURLs = Field(
        (),
        description="Parquet or JSON-lines files to train on, in this order before shuffling; paths or URLs "
        "(agentrl docs storage).",
    )
    val_files: PathsOrURLs = Field(
        (), description="Files to validate on, always completely and in order; paths or URLs."
    )
    shuffle: bool = Field(
        True, description="Shuffle the training rows again for each epoch, seeded by `trainer.seed`."
    )
    curriculum: CurriculumConfig = CurriculumConfig()
    max_prompt_tokens: int = Field(
        512, ge=1, description="Maximum prompt length in tokens, including tool schemas."
    )
    overlong_prompts: OverlongPrompts = Field(
        "filter", description="What to do with a longer prompt; filtered and truncated rows are counted."
    )
    max_train_rows: int | None = Field(None, ge=1, description="Use only the first N rows; None: all.")
    max_val_rows: int | None = Field(None, ge=1, description="Use only the first N rows; None: all.")
    check_rows: int = Field(
        2000,
        ge=0,
        description="Number of training rows of each file that are checked before anything starts; the other "
        "rows are checked when the replay buffer opens, before the first step.",
    )
    reader: str | None = Field(
        None,
        description="`module:function` or `file.py:function` that turns one row (a dict) into a Task; None: "
        "the columns below.",
    )
    data_source_key: str = Field("data_source", description="Column that chooses the reward.")
    prompt_key: str = Field("prompt", description="Column of the chat messages.")
    ability_key: str = Field("ability", description="Column of the ability label.")
    reward_model_key: str = Field("reward_model", description="Column of {style, ground_truth}.")
    extra_info_key: str = Field(
        "extra_info", description="Column of {tools_kwargs, interaction_kwargs, ...}."
    )
    agent_name_key: str = Field("agent_name", description="Column that chooses the agent; may be absent.")
    images: ImagesConfig = ImagesConfig()
