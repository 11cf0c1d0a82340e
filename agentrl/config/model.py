"""Config of the policy and its tokenizer: a loaded model, an adapter, or a new model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from agentrl.config.named_fields import NameIn
from agentrl.config.section import Section
from agentrl.config.storage_fields import PathOrURL

TOOL_FORMATS = "agentrl.tool_formats"
"""Entry points: name -> subclass of `agentrl.chat.parsing.ToolFormat`."""
_ROLE = re.compile(r"[A-Za-z][\w-]*", re.ASCII)


class LoRAConfig(Section):
    """A trained low-rank adapter beside frozen weights; servers get it alone, or the sum of both
    (`rollout.weights.adapter`).
    """

    rank: int = Field(0, ge=0, description="Rank of the adapter; 0: no adapter, all weights are trained.")
    alpha: float = Field(32.0, gt=0, description="The adapter's output is scaled by alpha / rank.")
    target_modules: tuple[str, ...] = Field(
        (), description="Names of the linear layers that get an adapter; (): all except the output head."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the adapter, only in updates.")
    path: PathOrURL = Field(
        "",
        description="Folder (adapter_config.json and adapter_model.safetensors, as peft and `agentrl export "
        "--adapter` write them), hub id or URL of an adapter to continue; its rank, alpha and target_modules "
        "must be those here. Empty: a new adapter, which adds nothing at first.",
    )

    roles: dict[str, tuple[str, ...]] = Field(
        {},
        description="Name of a further adapter -> names of the conversations that it speaks in, in place of "
        "the policy's own (docs/agents.md). All are trained together; {}: one adapter for all conversations.",
    )

    @property
    def adapter_of_conversation(self) -> dict[str, str]:
        """Name of a conversation with an adapter of its own -> that adapter."""
        return {conversation: name for name, own in self.roles.items() for conversation in own}

    @model_validator(mode="after")
    def _check_roles(self) -> LoRAConfig:
        if self.roles and self.rank == 0:
            raise ValueError("roles have adapters, and rank=0 trains all weights; set rank")
        for name, conversations in self.roles.items():
            if not _ROLE.fullmatch(name) or name == "policy":
                raise ValueError(
                    f"roles: {name!r} cannot be the name of an adapter; use letters, digits, - and _, and "
                    "not 'policy', which is the adapter of all other conversations"
                )
            if not conversations:
                raise ValueError(f"roles.{name}=[] speaks in no conversation; name some, or remove it")
            if "" in conversations:
                raise ValueError(f"roles.{name}={list(conversations)}: a conversation has a name; remove ''")
        given = [one for own in self.roles.values() for one in own]
        if twice := sorted({one for one in given if given.count(one) > 1}):
            raise ValueError(f"roles: conversation {twice[0]!r} has two adapters; name it once")
        return self

    @model_validator(mode="after")
    def _has_a_rank(self) -> LoRAConfig:
        if self.path and self.rank == 0:
            raise ValueError(
                f"path={self.path!r} continues an adapter, but rank=0 trains all weights; set rank, alpha "
                "and target_modules to those in its adapter_config.json"
            )
        return self


class ModelConfig(Section):
    """The policy and its tokenizer."""

    path: PathOrURL = Field("", description="Local folder, hub id or URL of the policy.")
    revision: str | None = Field(
        None, description="Branch, tag or commit of a hub id; None: its main branch."
    )
    tokenizer_path: str | None = Field(None, description="Folder of the tokenizer; None: `model.path`.")
    chat_template: str | None = Field(
        None,
        description="Packaged template or Jinja file that replaces the tokenizer's own template "
        "(docs/templates.md); None: the tokenizer's.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        description="Arguments of the chat template besides messages and tools, as in {enable_thinking: "
        "false}; a row's extra_info.chat_template_kwargs win over them (docs/templates.md).",
    )
    tool_format: Annotated[str, AfterValidator(NameIn("tool format", TOOL_FORMATS, also=("auto",)))] = Field(
        "auto",
        description="Format in which the model writes tool calls (docs/templates.md); auto: derived from the "
        "chat template; none: no tool calls.",
    )
    template_edits: Literal["fork", "refuse"] = Field(
        "fork",
        description="What to do if the chat template edits earlier turns (for instance drops their "
        "thinking). fork: start a new segment with the edited history; refuse: end the run "
        "before it starts.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="Parameter dtype of learner and servers; float16 is exported and served, but not "
        "trained.",
    )
    attention: Literal["auto", "sdpa", "segment_sdpa", "flash_attention_2", "flex_attention"] = Field(
        "auto",
        description="Attention of the learner. segment_sdpa: torch's own, segment by segment; on a GPU, in "
        "bfloat16, all segments in one kernel (FlashAttention). auto: segment_sdpa; on a GPU "
        "flash_attention_2 if the package flash-attn is installed, and flex_attention in float32.",
    )
    trust_remote_code: bool = Field(False, description="Allow Python code that comes with the model.")
    external_lib: str | None = Field(
        None,
        description="`package.module` or `file.py` to import before the model is loaded, for instance to "
        "register its class.",
    )
    lora: LoRAConfig = LoRAConfig()


class ModelFromScratchConfig(Section):
    """A new small model instead of `model.path`; without `model.tokenizer_path` it gets the byte-level
    tokenizer of this project.
    """

    architecture: Literal["none", "qwen2", "qwen3_moe"] = Field(
        "none", description="none: start from model.path. qwen3_moe: a mixture of experts."
    )
    sizes: dict[str, Any] = Field(
        {}, description="hidden_size, num_hidden_layers, ... of the architecture's config."
    )
