"""The schemas of supervised training: `agentrl sft` imitates conversations, `agentrl rm` trains a reward model on pairs."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from agentrl.config.agent import AgentConfig
from agentrl.config.cluster import ClusterConfig, refuse_impossible_layout
from agentrl.config.learner import LearnerConfig, refuse_shared_prefix
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.config.placement import PlacementConfig
from agentrl.config.profiler import ProfilerConfig
from agentrl.config.section import Section


class SFTDataConfig(Section):
    """Conversations to imitate: a column of messages, or a column of prompts and one of responses."""

    train_files: tuple[str, ...] = Field((), description="Parquet or JSON-lines files to learn from.")
    val_files: tuple[str, ...] = Field((), description="Files of the same form, held out: their loss is measured, nothing is learned.")
    messages_key: str = Field("messages", description="Column of the chat messages; every assistant message is learned.")
    prompt_key: str | None = Field(
        None, description="Column of the prompt, a text or messages; `column.field` looks into a struct; None: rows have `messages_key`."
    )
    response_key: str | None = Field(
        None, description="Column of the response, a text, which alone is learned; goes with `prompt_key`; None: rows have `messages_key`."
    )
    tools_key: str = Field("tools", description="Column of the tools shown, names or schemas; may be absent.")
    max_tokens: int = Field(1024, ge=1, description="Longest conversation.")
    overlong: Literal["drop", "truncate"] = Field(
        "drop", description="What happens to a longer one: left out, or cut behind `max_tokens`; both are counted."
    )

    @model_validator(mode="after")
    def _names_both_or_none(self) -> SFTDataConfig:
        if (self.prompt_key is None) != (self.response_key is None):
            given, missing = ("prompt_key", "response_key") if self.response_key is None else ("response_key", "prompt_key")
            raise ValueError(f"data.{given} goes with data.{missing}: name both columns, or neither and use data.messages_key")
        return self


class SFTTrainerConfig(Section):
    """How long, how often, where."""

    steps: int | None = Field(None, ge=1, description="Optimizer updates; None: by total_epochs.")
    prepared_by: tuple[str, ...] = Field(
        (), description="Commands that make the files this config reads, in their order; printed if one of the files is missing."
    )
    total_epochs: int = Field(1, ge=1, description="Passes over the training rows when `steps` is None; the last batch may be smaller.")
    batch_size: int = Field(64, ge=1, description="Conversations per update.")
    test_freq: int = Field(-1, ge=-1, description="Measure the validation loss every N updates; -1: only at the end.")
    save_freq: int = Field(-1, ge=-1, description="Checkpoint every N updates (and at the end); -1: never.")
    resume_mode: str = Field(
        "auto", description="auto: from the newest checkpoint of the run directory; disable; or the path of a checkpoint."
    )
    keep_last: int = Field(3, ge=1, description="Checkpoints kept.")
    output: str = Field("policy", description="Folder of the trained model, in Hugging Face format.")
    export: Literal["last", "best"] = Field(
        "last", description="What `output` gets: the last weights, or those with the lowest validation loss so far."
    )
    untrained_output: str | None = Field(
        None, description="Folder for the model as it was before the first update, a baseline; None: not kept."
    )
    run_dir: str | None = Field(
        None, description="Folder of metrics.jsonl, config.yaml and checkpoints; None: `output` with _run behind it."
    )
    seed: int = Field(0, ge=0, description="Seed of initialisation and order.")
    logger: tuple[Literal["console", "wandb", "tensorboard"], ...] = Field(("console",), description="Trackers beside metrics.jsonl.")
    wandb_mode: Literal["online", "offline", "disabled"] = Field("offline", description="wandb's mode; offline needs no network.")


class RMDataConfig(Section):
    """Pairs of answers, of which people (or a program) preferred one."""

    train_files: tuple[str, ...] = Field((), description="Parquet or JSON-lines files to learn from.")
    val_files: tuple[str, ...] = Field((), description="Files of the same form, held out: their loss and accuracy are measured.")
    prompt_key: str = Field("prompt", description="Column of the prompt, a text or messages; absent where the answers hold it.")
    chosen_key: str = Field("chosen", description="Column of the preferred answer, a text or messages.")
    rejected_key: str = Field("rejected", description="Column of the other answer, of the same form.")
    tools_key: str = Field("tools", description="Column of the tools shown, names or schemas; may be absent.")
    max_tokens: int = Field(1024, ge=2, description="Longest conversation, prompt and answer.")
    overlong: Literal["drop", "truncate"] = Field(
        "drop", description="What happens to a pair with a longer one: left out, or its beginning is cut off; both are counted."
    )


class RMTrainerConfig(SFTTrainerConfig):
    """How long, how often, where."""

    batch_size: int = Field(64, ge=1, description="Pairs per update.")
    output: str = Field("reward_model", description="Folder of the trained model, in Hugging Face format.")


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
            raise ValueError("trainer.export=best is chosen by the validation loss: name data.val_files, or use trainer.export=last")
        return self

    @model_validator(mode="after")
    def _check_placement(self) -> Self:
        refuse_impossible_layout(self.placement, {"actor": self.learner.world_size}, self.cluster)
        self.profiler.nsight.refuse_absent({"actor"})
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
        if self.learner.shared_prefix:
            raise ValueError(
                "learner.shared_prefix is for the attempts of a group; pairs are scored apart: use learner.shared_prefix=false"
            )
        return self
