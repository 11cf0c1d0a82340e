"""The schemas of supervised training: `agentrl sft` imitates conversations, `agentrl rm` trains a reward
model on pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.config.agent import AgentConfig
from agentrl.config.cluster import ClusterConfig, refuse_impossible_layout
from agentrl.config.compose import load_section
from agentrl.config.images import ImagesConfig
from agentrl.config.learner import LearnerConfig, refuse_shared_prefix
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.config.placement import PlacementConfig
from agentrl.config.profiler import ProfilerConfig
from agentrl.config.section import Section
from agentrl.config.service_fields import ServiceURI
from agentrl.config.storage_fields import FolderBesideOutput, PathOrURL, PathsOrURLs
from agentrl.config.tracking import TrackerName
from agentrl.config.trainer import Verify


class SFTDataConfig(Section):
    """Conversations to imitate: a column of messages, or a column of prompts and one of responses."""

    train_files: PathsOrURLs = Field((), description="Parquet or JSON-lines files to train on.")
    val_files: PathsOrURLs = Field(
        (), description="Held-out files of the same form: their loss is measured, they are not trained on."
    )
    messages_key: str = Field(
        "messages", description="Column of the chat messages; every assistant message is trained on."
    )
    prompt_key: str | None = Field(
        None,
        description="Column of the prompt, text or messages; `column.field` selects a field of a struct; "
        "None: rows have `messages_key`.",
    )
    response_key: str | None = Field(
        None,
        description="Column of the response, text, the only part that is trained on; requires `prompt_key`; "
        "None: rows have `messages_key`.",
    )
    tools_key: str = Field(
        "tools", description="Column of the tools in the prompt, names or schemas; may be absent."
    )
    chat_template_kwargs_key: str = Field(
        "chat_template_kwargs",
        description="Column of a row's arguments for the chat template, or column.field; they win over "
        "`model.chat_template_kwargs`; may be absent.",
    )
    max_tokens: int = Field(1024, ge=1, description="Longest conversation.")
    overlong: Literal["drop", "truncate"] = Field(
        "drop",
        description="What to do with a longer conversation: leave it out, or cut it after `max_tokens`; both "
        "are counted.",
    )
    images: ImagesConfig = ImagesConfig()

    @model_validator(mode="after")
    def _names_both_or_none(self) -> SFTDataConfig:
        if (self.prompt_key is None) != (self.response_key is None):
            given, missing = (
                ("prompt_key", "response_key")
                if self.response_key is None
                else ("response_key", "prompt_key")
            )
            raise ValueError(
                f"data.{given} requires data.{missing}: set both columns, or neither and use "
                "data.messages_key"
            )
        return self


class SFTTrainerConfig(Section):
    """How long, how often, where."""

    steps: int | None = Field(None, ge=1, description="Optimizer updates; None: by total_epochs.")
    prepared_by: tuple[str, ...] = Field(
        (),
        description="Commands that create the files that this config reads, in order; printed if a file is "
        "missing.",
    )
    total_epochs: int = Field(
        1,
        ge=1,
        description="Passes over the training rows when `steps` is None; the last batch may be smaller.",
    )
    batch_size: int = Field(64, ge=1, description="Conversations per update.")
    test_freq: int = Field(
        -1, ge=-1, description="Measure the validation loss every N updates; -1: only at the end."
    )
    save_freq: int = Field(-1, ge=-1, description="Checkpoint every N updates (and at the end); -1: never.")
    resume_mode: str = Field(
        "auto",
        description="auto: from the newest checkpoint of the run directory; disable; or the path of a "
        "checkpoint.",
    )
    verify: Verify = Field(
        "sample",
        description="What is verified of a checkpoint before it is loaded. full: every byte, by all ranks in "
        "parallel. sample: sizes of all files, and the bytes of all but large shards, of which 64 MiB each.",
    )
    keep_last: int = Field(3, ge=1, description="Checkpoints kept.")
    output: PathOrURL = Field(
        "policy",
        description="Folder of the trained model, in Hugging Face format; a URL gets it at the end.",
    )
    export: Literal["last", "best"] = Field(
        "last",
        description="What `output` gets: the last weights, or those with the lowest validation loss so far.",
    )
    untrained_output: FolderBesideOutput = Field(
        None, description="Folder for the model before the first update, as a baseline; None: not saved."
    )
    run_dir: FolderBesideOutput = Field(
        None,
        description="Folder of metrics.jsonl, config.yaml and checkpoints; None: `output` with the suffix "
        "_run, in the cache (agentrl docs storage) if `output` is a URL.",
    )
    seed: int = Field(0, ge=0, description="Seed of the initialization and the data order.")
    logger: tuple[TrackerName, ...] = Field(
        ("console",), description="Trackers in addition to metrics.jsonl."
    )
    wandb_mode: Literal["online", "offline", "disabled"] = Field(
        "offline", description="wandb's mode; offline needs no network."
    )
    mlflow_uri: ServiceURI = Field(
        None,
        description="MLflow's tracking URI; None: the environment's MLFLOW_TRACKING_URI, or else a database "
        "in the run directory, mlflow.db.",
    )


class RMDataConfig(Section):
    """Pairs of answers, of which people (or a program) preferred one."""

    train_files: PathsOrURLs = Field((), description="Parquet or JSON-lines files to train on.")
    val_files: PathsOrURLs = Field(
        (), description="Held-out files of the same form: their loss and accuracy are measured."
    )
    prompt_key: str = Field(
        "prompt", description="Column of the prompt, text or messages; absent if the answers contain it."
    )
    chosen_key: str = Field("chosen", description="Column of the preferred answer, text or messages.")
    rejected_key: str = Field("rejected", description="Column of the rejected answer, in the same form.")
    tools_key: str = Field(
        "tools", description="Column of the tools in the prompt, names or schemas; may be absent."
    )
    chat_template_kwargs_key: str = Field(
        "chat_template_kwargs",
        description="Column of a row's arguments for the chat template, or column.field; they win over "
        "`model.chat_template_kwargs`; may be absent.",
    )
    max_tokens: int = Field(
        1024, ge=2, description="Maximum length of a conversation (prompt and answer), in tokens."
    )
    overlong: Literal["drop", "truncate"] = Field(
        "drop",
        description="What to do with a pair that contains a longer conversation: leave the pair out, or cut "
        "the beginning; both are counted.",
    )


class RMTrainerConfig(SFTTrainerConfig):
    """How long, how often, where."""

    batch_size: int = Field(64, ge=1, description="Pairs per update.")
    output: PathOrURL = Field(
        "reward_model",
        description="Folder of the trained model, in Hugging Face format; a URL gets it at the end.",
    )


class SupervisedConfig(Section):
    """The common sections of `agentrl sft` and `agentrl rm`."""

    data: SFTDataConfig | RMDataConfig
    model: ModelConfig = ModelConfig()
    from_scratch: ModelFromScratchConfig = ModelFromScratchConfig()
    agent: AgentConfig = AgentConfig()
    learner: LearnerConfig = LearnerConfig()
    trainer: SFTTrainerConfig = SFTTrainerConfig()
    cluster: ClusterConfig = ClusterConfig()
    placement: PlacementConfig = PlacementConfig()
    profiler: ProfilerConfig = ProfilerConfig()

    @model_validator(mode="after")
    def _has_what_best_needs(self) -> Self:
        if self.trainer.export == "best" and not self.data.val_files:
            raise ValueError(
                "trainer.export=best needs a validation loss: set data.val_files, or use trainer.export=last"
            )
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        refuse_impossible_layout(self.placement, {"actor": self.learner.world_size}, self.cluster)
        self.profiler.nsight.refuse_absent({"actor"})
        return self

    @model_validator(mode="after")
    def _has_one_adapter(self) -> Self:
        if self.model.lora.roles:
            raise ValueError(
                "model.lora.roles: supervised conversations have no roles; train one adapter, and continue "
                "it by model.lora.path"
            )
        return self


class SFTConfig(SupervisedConfig):
    """A supervised run (`agentrl sft`)."""

    data: SFTDataConfig = SFTDataConfig()

    @model_validator(mode="after")
    def _can_share_prefixes(self) -> Self:
        refuse_shared_prefix(self.model, self.learner)
        return self


class RMConfig(SupervisedConfig):
    """A run that trains a reward model (`agentrl rm`)."""

    data: RMDataConfig = RMDataConfig()
    trainer: RMTrainerConfig = RMTrainerConfig()

    @model_validator(mode="after")
    def _scores_pairs_apart(self) -> Self:
        if self.learner.shared_prefix is True:
            raise ValueError(
                "learner.shared_prefix=true cannot be used for pairs, which are scored separately; use "
                "learner.shared_prefix=false"
            )
        return self


def load_sft_config(path: str, overrides: Sequence[str] = ()) -> SFTConfig:
    """Load a config of supervised training; see `load_section`."""
    return load_section(SFTConfig, path, overrides)


def load_rm_config(path: str, overrides: Sequence[str] = ()) -> RMConfig:
    """Load a config for training a reward model; see `load_section`."""
    return load_section(RMConfig, path, overrides)
