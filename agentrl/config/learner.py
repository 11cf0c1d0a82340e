"""Config of the learner: its ranks, microbatches and optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.model import ModelConfig
from agentrl.config.section import Section

SharedPrefix = bool | Literal["auto"]
"""Values of `learner.shared_prefix`."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    lr: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's betas.")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay, as in AdamW.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Decay to 0 over the run's updates."
    )
    warmup_updates: int = Field(0, ge=0, description="Linear warm-up, in optimizer updates.")
    grad_clip: float | None = Field(1.0, gt=0, description="Maximum global gradient norm; None: no clipping.")


class FSDPConfig(Section):
    """How the weights are spread over the learner's ranks: memory against communication."""

    shard_size: int | None = Field(
        None,
        ge=1,
        description="Number of ranks that share one copy of the weights; must divide `world_size`. None: all "
        "ranks; fewer: HSDP, one copy per set of ranks.",
    )
    reshard_after_forward: bool = Field(
        True,
        description="Free a layer's gathered weights after its forward pass and gather them again for its "
        "backward pass; false: keep them.",
    )
    forward_prefetch: int = Field(
        0,
        ge=0,
        description="Number of layers whose weights are gathered ahead of their forward pass; 0: FSDP's "
        "default prefetching.",
    )


class LearnerConfig(Section):
    """FSDP ranks and the optimizer step."""

    world_size: int = Field(
        1,
        ge=1,
        description="Number of FSDP ranks; each processes its own microbatches, unless ranks share them.",
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="Number of ranks over which the tokens of each microbatch are split, for long contexts "
        "(Ulysses); must divide `world_size` and the model's number of attention heads. 1: off.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        description="Number of ranks over which the matrices of each layer are split (Llama, Qwen2, Qwen3, "
        "and with `expert_parallel` Qwen3-MoE, Qwen2-MoE, Mixtral); must divide `world_size` (with HSDP "
        "`fsdp.shard_size`). 1: off.",
    )
    expert_parallel: int = Field(
        1,
        ge=1,
        description="Number of ranks over which the experts of each layer are divided (mixtures of experts); "
        "must divide `world_size` (with HSDP `fsdp.shard_size`) and the model's number of experts. Tokens "
        "travel between these ranks instead of weights. 1: off.",
    )
    threads: int = Field(1, ge=1, description="CPU threads of torch per rank.")
    microbatch_tokens: int = Field(
        16384,
        ge=1,
        description="Packed tokens per forward pass and rank; if ranks share a microbatch, the total of "
        "these ranks.",
    )
    shared_prefix: SharedPrefix = Field(
        "auto",
        description="Compute tokens that several rows begin with only once per microbatch: the prompt of a "
        "group, equal turns, what forks share. auto: where that takes less time, if model and attention can; "
        "true: always, and attention is `segment_sdpa`.",
    )
    minibatches_per_step: int = Field(
        1, ge=1, description="Optimizer updates per pass over the batch, which is split by groups."
    )
    epochs_per_step: int = Field(1, ge=1, description="Passes over the batch.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")
    activation_offload: bool = Field(
        False,
        description="Keep the inputs from which `gradient_checkpointing` recomputes layers in the host's "
        "memory until the backward pass, for long contexts on GPUs.",
    )
    logprob_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="Number of tokens whose logits are held in memory at a time; None: about 64 MiB of "
        "logits on a CPU, 512 MiB on a GPU.",
    )
    logprob_kernels: Literal["eager", "compiled"] = Field(
        "eager",
        description="How log-probabilities, entropies and gradients are computed from a chunk of logits. "
        "eager: operator by operator; compiled: one Triton kernel each, on a GPU.",
    )
    linear_kernels: Literal["auto", "torch", "onednn"] = Field(
        "auto",
        description="Library for float32 matrix products on a CPU. torch: torch's BLAS; onednn: oneDNN; "
        "auto: oneDNN on an AMD processor with AVX-512, where it takes half the time.",
    )
    compile: bool = Field(
        False, description="Compile each layer with torch.compile; the first updates wait for the compiler."
    )
    offload: Literal["none", "optimizer", "parameters"] = Field(
        "none",
        description="What is kept on the CPU. optimizer: the optimizer's state, between updates; parameters: "
        "weights, gradients and optimizer state, which are then updated on the CPU.",
    )
    fsdp: FSDPConfig = FSDPConfig()
    collective_timeout_s: float = Field(
        300.0, gt=0, description="Deadline of a collective; when it passes, a rank counts as lost."
    )
    save_timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Deadline of writing a checkpoint; when it passes, the checkpoint has failed, and the "
        "next step of a run retries.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="How many times in a run all ranks may restart from the newest checkpoint after a rank "
        "was lost, before the run ends.",
    )
    balance_coefficient: float = Field(
        0.0,
        ge=0,
        description="Mixtures of experts: weight of the loss that keeps the load of the experts even in each "
        "sequence (the sequence-wise balance loss of DeepSeek-V3); 0: off.",
    )
    optimizer: OptimizerConfig = OptimizerConfig()

    @property
    def num_replicas(self) -> int:
        """Number of ranks that process the same microbatches."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def dp_size(self) -> int:
        """Data-parallel size: ranks that share their microbatches count as one."""
        return self.world_size // self.num_replicas

    @model_validator(mode="after")
    def _microbatches_are_shared_evenly(self) -> LearnerConfig:
        for name in ("sequence_parallel", "tensor_parallel"):
            size = getattr(self, name)
            if self.world_size % size:
                raise ValueError(
                    f"{name}={size} does not divide world_size={self.world_size}; every "
                    "microbatch must be shared by the same number of ranks"
                )
        if self.world_size % self.num_replicas:
            raise ValueError(
                f"sequence_parallel={self.sequence_parallel} times tensor_parallel={self.tensor_parallel} "
                f"does not divide world_size={self.world_size}; every microbatch must be shared by the same "
                "number of ranks"
            )
        shards = "world_size" if self.fsdp.shard_size is None else "fsdp.shard_size"
        size = self.fsdp.shard_size or self.world_size
        if size % self.expert_parallel:
            raise ValueError(
                f"expert_parallel={self.expert_parallel} does not divide {shards}={size}; every expert must "
                "have the same number of owners"
            )
        return self

    @model_validator(mode="after")
    def _matrices_are_split_evenly(self) -> LearnerConfig:
        tensor, shards, experts = self.tensor_parallel, self.fsdp.shard_size, self.expert_parallel
        if shards is not None and shards % tensor:
            raise ValueError(
                f"tensor_parallel={tensor} does not divide fsdp.shard_size={shards}; every copy of the "
                f"weights must have whole sets of ranks that split its matrices; use a multiple of {tensor}"
            )
        if experts > 1 and experts % tensor:
            raise ValueError(
                f"tensor_parallel={tensor} does not divide expert_parallel={experts}; ranks that split the "
                f"matrices of a microbatch send its tokens to different experts; use a multiple of {tensor}"
            )
        if tensor > 1 and self.compile:
            raise ValueError(
                f"tensor_parallel={tensor} cannot be combined with compile=true; leave one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _inputs_are_recomputed_from(self) -> LearnerConfig:
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "activation_offload=true moves the inputs from which layers are recomputed, and without "
                "gradient_checkpointing nothing is; use gradient_checkpointing=true as well"
            )
        return self

    @model_validator(mode="after")
    def _copies_are_even(self) -> LearnerConfig:
        refuse_uneven_copies(self.fsdp, self.world_size)
        return self


def refuse_uneven_copies(fsdp: FSDPConfig, world_size: int) -> None:
    """Check that every copy of the weights has the same number of ranks.

    Raises:
        ValueError: `fsdp.shard_size` does not divide `world_size`.
    """
    if fsdp.shard_size is not None and world_size % fsdp.shard_size:
        raise ValueError(
            f"fsdp.shard_size={fsdp.shard_size} does not divide world_size={world_size}; every "
            "copy of the weights needs the same number of ranks"
        )


def refuse_shared_prefix(model: ModelConfig, learner: LearnerConfig) -> None:
    """Check that the model's attention and the layout of the ranks support `learner.shared_prefix=true`.

    Raises:
        ValueError: one of them does not.
    """
    if learner.shared_prefix is not True:
        return
    if model.attention not in ("auto", "segment_sdpa"):
        raise ValueError(
            "learner.shared_prefix=true needs an attention in which several segments attend to one "
            f"prefix, and {model.attention} does not allow that; use model.attention=segment_sdpa"
        )
    if learner.sequence_parallel > 1:
        raise ValueError(
            "learner.shared_prefix=true cannot be combined with "
            f"learner.sequence_parallel={learner.sequence_parallel}; use shared_prefix=auto or "
            "sequence_parallel=1"
        )
