"""Peak memory of a rank of the learner, from the sizes of its model alone.

Weights, gradients and AdamW's moments follow exactly from the config. Activations are counted tensor by
tensor, as autograd keeps them. FSDP's buffers and the temporaries of the head are estimates.

A rank keeps its state all the time. On top come, one after the other:
    between forward and backward   activations of a microbatch, gathered layers, logits, gradient of the head
    the end of the backward        gathered embedding and head, their gradients, buffers of the reduction
    the step                       temporaries of AdamW, and its moments if they are kept on the CPU
The largest of these moments counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.model_flops import ModelFlops
from agentrl.config.model_size import ModelSize

GIB = 1 << 30
PROCESS_BYTES = 0.45 * GIB
"""Host memory of a rank, and of a server, with a model of no size: Python, torch, Ray."""
HEAP_SHARE = 1.3
"""Size of the heap over that of the activations in it, on a CPU: gaps between them stay unused. Without gaps,
when freed memory goes back to the kernel, an update takes twice the time.
"""
HEAP_SHARE_OF_ADAPTERS = 1.95
"""The same with adapters, each of which leaves three temporaries."""
_MASTER_BYTES = 4
_LOGITS = {False: 2**24, True: 2**27}
"""Logits of a chunk of the head; on a GPU: True."""
_COPIES_OF_LOGITS = 6
"""Products, their softmax, gradients and temporaries, in float32."""
_GATHERED_LAYERS = 3
"""Layers in FSDP's buffers: the one that computes, the next one, and its copy in the collective's buffer."""
_INPUTS_AT_HAND = 3
"""Inputs of layers on a GPU with `learner.activation_offload`."""
_GATHERED_ON_CPU = 2.5
"""On CPUs, FSDP's buffers leave gaps in the heap: about so many times the whole model in the end."""

_BY_ROWS = ("o_proj", "down_proj")
"""Matrices whose columns tensor parallelism divides; of the others it divides rows."""

Parts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank where it computes, in bytes.

    state: kept all the time, by what it is.
    working: on top of it at the largest moment.
    host: kept in the host's memory, because of `learner.offload` or `learner.activation_offload`.
    """

    state: Parts
    working: Parts
    host: Parts = field(default_factory=dict)

    @property
    def state_bytes(self) -> float:
        return sum(self.state.values())

    @property
    def working_bytes(self) -> float:
        return sum(self.working.values())

    @property
    def peak_bytes(self) -> float:
        return self.state_bytes + self.working_bytes

    @property
    def parts(self) -> dict[str, float]:
        """State and working memory by what it is, without what is empty."""
        return {name: size for name, size in {**self.state, **self.working}.items() if size > 0}


def trained_memory(
    size: ModelSize,
    model: ModelConfig,
    learner: LearnerConfig,
    *,
    tokens: int,
    is_gpu: bool,
    has_reference: bool = False,
    has_logits: bool = True,
    teacher: ModelSize | None = None,
) -> RankMemory:
    """Return the memory of a rank that updates a model.

    Args:
        tokens: packed tokens of a microbatch, of all ranks that share it.
        has_reference: a frozen copy of the model scores too. With an adapter it is the model itself.
        has_logits: False for a head of one column.
        teacher: of another frozen model that scores; None: there is none.
    """
    width = _width(model)
    shard = _shard_parameters(size, learner)
    adapters = _adapter_parameters(size, model, learner)
    trained = adapters / _num_shards(learner) if model.lora.rank else shard
    state = {
        "weights": _MASTER_BYTES * trained,
        "gradients": _MASTER_BYTES * trained,
        "optimizer state": 2 * _MASTER_BYTES * trained,
    }
    frozen = width * shard * (bool(model.lora.rank) + (has_reference and not model.lora.rank))
    if frozen:
        state["frozen weights"] = frozen
    if teacher is not None:
        state["the teacher's weights"] = width * _shard_parameters(teacher, learner)
    moments = [
        _turn(size, model, learner, tokens=tokens, is_gpu=is_gpu, has_logits=has_logits),
        _end_of_backward(size, model, learner, is_gpu=is_gpu),
        _step(state, learner, is_gpu=is_gpu),
    ]
    if teacher is not None:
        moments.append(dict(frozen_memory(teacher, model, learner, tokens=tokens, is_gpu=is_gpu).working))
    host: dict[str, float] = {}
    if is_gpu and learner.offload == "parameters":
        state, host = {}, state
    elif is_gpu and learner.offload == "optimizer":
        host = {"optimizer state": state.pop("optimizer state")}
    if is_gpu and learner.activation_offload:
        inputs = (size.num_layers - 1) * width * size.hidden_size * _own_tokens(learner, tokens)
        host = {**host, "inputs of layers": inputs}
    return RankMemory(state, max(moments, key=lambda parts: sum(parts.values())), host)


def frozen_memory(
    size: ModelSize, model: ModelConfig, learner: LearnerConfig, *, tokens: int, is_gpu: bool
) -> RankMemory:
    """Return the memory of a rank that only scores, such as one of a reward model."""
    width = _width(model)
    state = {"weights": width * _shard_parameters(size, learner)}
    # Without a backward, only the tensors of one layer live at the same time.
    one_layer = _layer_bytes(size, model, learner, is_gpu=is_gpu) * _own_tokens(learner, tokens)
    working = {"gathered weights": _gathered(size, model, learner, is_gpu=is_gpu), "activations": one_layer}
    if is_gpu and learner.offload == "parameters":
        return RankMemory({}, working, state)
    return RankMemory(state, working)


def activation_bytes_per_token(
    size: ModelSize, model: ModelConfig, learner: LearnerConfig, *, is_gpu: bool
) -> float:
    """Return the bytes that autograd keeps per token of a rank between forward and backward."""
    layer = _layer_bytes(size, model, learner, is_gpu=is_gpu)
    width, hidden = _width(model), size.hidden_size
    if not learner.gradient_checkpointing:
        return size.num_layers * layer + 3 * width * hidden
    # The input of each layer, and all of the one that is computed again. With offloading, the inputs of three
    # layers: the last one, and two on their way.
    is_away = learner.activation_offload and is_gpu
    num_inputs = min(_INPUTS_AT_HAND, size.num_layers) if is_away else size.num_layers
    return num_inputs * width * hidden + layer + 3 * width * hidden


# ------------------------------------------------------------------------------------------------ the moments


def _turn(
    size: ModelSize,
    model: ModelConfig,
    learner: LearnerConfig,
    *,
    tokens: int,
    is_gpu: bool,
    has_logits: bool,
) -> dict[str, float]:
    own = _own_tokens(learner, tokens)
    width = _width(model)
    share = 1.0 if is_gpu else HEAP_SHARE_OF_ADAPTERS if model.lora.rank else HEAP_SHARE
    # Gradients on their way through one layer, while all activations are still kept.
    on_the_way = width * (2 * size.hidden_size + 3 * size.intermediate_size / learner.tensor_parallel)
    per_token = activation_bytes_per_token(size, model, learner, is_gpu=is_gpu) + on_the_way
    parts = {
        "gathered weights": _gathered(size, model, learner, is_gpu=is_gpu),
        "activations": share * own * per_token,
    }
    if has_logits:
        chunk = learner.logprob_chunk_tokens or max(1, _LOGITS[is_gpu] // size.vocab_size)
        parts["logits"] = _COPIES_OF_LOGITS * 4 * min(own, chunk) * size.vocab_size
        if not model.lora.rank:
            # Summed over chunks in float32, and then cast.
            parts["gradient of the head"] = (4 + (width if width < 4 else 0)) * size.num_head_parameters
    return parts


def _end_of_backward(
    size: ModelSize, model: ModelConfig, learner: LearnerConfig, *, is_gpu: bool
) -> dict[str, float]:
    if _is_alone(model, learner, is_gpu=is_gpu) or model.lora.rank:
        return {}
    width = _width(model)
    root, layer = size.num_root_parameters, _layer_parameters(size, learner)
    return {
        "gathered weights": width * root,
        # Gradients in the dtype of the products, and their copy in float32 that is reduced over the ranks.
        "gradients before their reduction": (width + _MASTER_BYTES) * (root + layer),
    }


def _step(state: Parts, learner: LearnerConfig, *, is_gpu: bool) -> dict[str, float]:
    if not is_gpu or learner.offload == "parameters":
        return {}  # on a CPU, AdamW has no temporaries
    parts = {"temporaries of the step": state["weights"]}
    if learner.offload == "optimizer":
        parts["optimizer state"] = state["optimizer state"]
    return parts


# -------------------------------------------------------------------------------------------------- the parts


def _layer_bytes(size: ModelSize, model: ModelConfig, learner: LearnerConfig, *, is_gpu: bool) -> float:
    """Return the bytes per token that autograd keeps of a layer.

    A norm keeps its input in float32, what it normalized, and its output, which the matrices read; attention
    its queries, keys, values and output, and the copy of it that the next matrix reads; an MLP the products
    of gate and up, the activated gate, and what down reads. An expert keeps that for each token sent to it,
    with copies of what it got and gave.
    """
    width, hidden, split = _width(model), size.hidden_size, learner.tensor_parallel
    kept = 1 if model.lora.rank else 2  # the gradient of a norm's own weights needs what it normalized
    norms = 2 * hidden * (4 + kept * width)
    attention = width * (3 * size.attention_width + 2 * size.kv_width) / split + 4 * size.num_heads / split
    attention += size.query_norms * (4 + (kept - 1) * width) / split
    dense = 4 * width * size.intermediate_size / split
    if size.experts is None:
        return norms + attention + dense
    own, copies = size.experts, 2 if is_gpu else 3
    routed = own.per_token * (copies * hidden + 4 * own.width) / split
    sparse = width * (routed + 4 * own.shared_width + (hidden if own.shared_width else 0)) + 4 * own.num
    sparse_share = size.num_expert_layers / size.num_layers
    return norms + attention + sparse_share * sparse + (1 - sparse_share) * dense


def _gathered(size: ModelSize, model: ModelConfig, learner: LearnerConfig, *, is_gpu: bool) -> float:
    if _is_alone(model, learner, is_gpu=is_gpu):
        return 0.0
    if not is_gpu:
        experts = size.num_expert_layers * _expert_parameters(size)
        layers = _own_parameters(size.num_layer_parameters, experts, learner)
        return _GATHERED_ON_CPU * _width(model) * (layers + size.num_root_parameters)
    num_layers = _GATHERED_LAYERS if learner.fsdp.reshard_after_forward else size.num_layers + 1
    layers = min(num_layers, size.num_layers + 1) * _layer_parameters(size, learner)
    return _width(model) * (size.num_root_parameters + layers)


def _layer_parameters(size: ModelSize, learner: LearnerConfig) -> float:
    return _own_parameters(size.largest_layer_parameters, _expert_parameters(size), learner)


def _expert_parameters(size: ModelSize) -> int:
    """Return the parameters of a layer's experts; 0 for a dense model."""
    return 0 if size.experts is None else 3 * size.hidden_size * size.experts.width * size.experts.num


def _own_parameters(whole: float, experts: float, learner: LearnerConfig) -> float:
    """Return what a rank gathers of layers that are divided before FSDP shards them: the experts that it
    owns, and its part of the other matrices.

    whole: parameters of one layer or more; experts: those of experts among them.
    """
    return (whole - experts) / learner.tensor_parallel + experts / learner.expert_parallel


def _shard_parameters(size: ModelSize, learner: LearnerConfig) -> float:
    """Return a rank's part of all weights: layers are cut by tensor parallelism first, and then sharded."""
    whole = size.num_layer_parameters / learner.tensor_parallel + size.num_root_parameters
    return whole / _num_shards(learner)


def _num_shards(learner: LearnerConfig) -> int:
    """Return the number of ranks over which FSDP shards."""
    return (learner.fsdp.shard_size or learner.world_size) // learner.tensor_parallel


def _adapter_parameters(size: ModelSize, model: ModelConfig, learner: LearnerConfig) -> float:
    """Return the parameters of the adapters before FSDP shards them; of each, tensor parallelism cuts one
    factor.
    """
    whole, named = ModelFlops(size, model.lora).num_adapter_parameters, model.lora.target_modules
    cut = sum(
        columns if name in _BY_ROWS else rows
        for name, (columns, rows) in size.linears.items()
        if not named or name in named
    )
    return whole - size.num_layers * model.lora.rank * cut * (1 - 1 / learner.tensor_parallel)


def _own_tokens(learner: LearnerConfig, tokens: int) -> float:
    return tokens / learner.sequence_parallel


def _is_alone(model: ModelConfig, learner: LearnerConfig, *, is_gpu: bool) -> bool:
    """Return whether the rank has plain tensors instead of FSDP's."""
    return not is_gpu and learner.world_size == 1 and model.dtype == "float32"


def _width(model: ModelConfig) -> int:
    """Return the bytes of a number in the dtype that is computed with."""
    return 4 if model.dtype == "float32" else 2
