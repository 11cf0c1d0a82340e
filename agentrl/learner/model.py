"""The policy: built from a folder or from sizes, sharded by FSDP2, and put through one forward for packed microbatches.

Master weights are float32; FSDP computes in `model.dtype` and reduces gradients in float32. So a small learning rate is not
lost to the rounding of bfloat16 weights, and the published weights are the master weights in `model.dtype`, as computed with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from agentrl.config.schema import LearnerConfig, ModelConfig, ModelFromScratchConfig
from agentrl.errors import ConfigError
from agentrl.learner import sharding
from agentrl.learner.attention import choose_attention, packed_arguments
from agentrl.learner.batch import Microbatch
from agentrl.learner.ranks import Place
from agentrl.learner.scoring import ScoreRequest, answer_scores


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A sharded model. `tensors` are its weights as published: tied ones once, by the name that comes first."""

    module: PreTrainedModel
    class_name: str
    attention: str
    device: torch.device
    published_dtype: torch.dtype
    tensors: Mapping[str, Tensor]

    def score(self, microbatch: Microbatch, positions_A: Tensor, targets_A: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of the targets and entropies at the positions that predict them, each f[A] with gradient.

        No logits are computed for other positions, and for these no more than a chunk at once (see `answer_scores`).
        """
        logprobs, entropies = self.module(
            input_ids=torch.tensor(microbatch.token_ids, device=self.device)[None],
            position_ids=torch.tensor(microbatch.position_ids, device=self.device)[None],
            # A cache would make transformers ignore the restarts of the position ids in eval mode: sequences would see each other.
            use_cache=False,
            score=ScoreRequest(positions_A, targets_A, temperature),
            **packed_arguments(self.attention, microbatch.segment_lengths.tolist(), device=self.device),
        )
        return logprobs, entropies

    def reshard(self) -> None:
        """Free gathered weights after a forward without backward: they would go stale at the next optimizer step."""
        sharding.reshard(self.module)

    def full_tensor(self, name: str) -> Tensor:
        """Gather one weight as published: on this rank's device, in `published_dtype`. A collective."""
        tensor = self.tensors[name].detach()
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to(self.published_dtype)


def build_policy(
    model: ModelConfig,
    learner: LearnerConfig,
    place: Place,
    *,
    from_scratch: ModelFromScratchConfig | None,
    has_backward: bool,
    master_dtype: torch.dtype,
) -> Policy:
    """Build the model on every rank, equal by the current seed or by the files, and shard it.

    Raises:
        ConfigError: there is no such model, or its sizes are wrong.
    """
    attention = choose_attention(model.attention, device=place.device.type)
    if from_scratch is not None and from_scratch.architecture != "none":
        module = _new_model(model, from_scratch, attention, master_dtype)
    else:
        module = _load_model(model, attention, master_dtype)
    class_name = type(module).__name__
    published_dtype = getattr(torch, model.dtype)
    compute_dtype = published_dtype if published_dtype != torch.float32 else None
    answer_scores(module, chunk_tokens=learner.logprob_chunk_tokens)
    sharding.shard(module, place.mesh, learner, compute_dtype=compute_dtype, has_backward=has_backward)
    return Policy(module, class_name, attention, place.device, published_dtype, _tensors(module))


def _load_model(model: ModelConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(
            model.path, dtype=dtype, attn_implementation=attention, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={model.path!r} cannot be loaded as a causal language model: {error}") from error


def _new_model(model: ModelConfig, from_scratch: ModelFromScratchConfig, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    sizes = dict(from_scratch.sizes)
    unknown = sorted(set(sizes) - set(Qwen2Config().to_dict()))
    if unknown:
        raise ConfigError(f"from_scratch.sizes has the unknown key {unknown[0]!r}; its keys are those of transformers' Qwen2Config")
    if "vocab_size" not in sizes:
        sizes["vocab_size"] = _vocabulary_size(model)
    return AutoModelForCausalLM.from_config(Qwen2Config(**sizes), dtype=dtype, attn_implementation=attention)


def _vocabulary_size(model: ModelConfig) -> int:
    file = Path(model.tokenizer_path or model.path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{file} does not exist; set model.tokenizer_path to the folder of a tokenizer, or from_scratch.sizes.vocab_size")
    return Tokenizer.from_file(str(file)).get_vocab_size(with_added_tokens=True)


def _tensors(module: PreTrainedModel) -> dict[str, Tensor]:
    """Sharded tensors by state-dict name, each shared one once. FSDP keeps these objects for as long as the model lives."""
    by_id: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        by_id.setdefault(id(tensor), (name, tensor))
    return dict(by_id.values())
