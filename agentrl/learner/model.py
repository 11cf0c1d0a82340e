"""The policy: loaded from a folder or built from sizes, sharded by FSDP2, run on packed microbatches.

Master weights are float32. FSDP computes in `model.dtype` and reduces gradients in float32. A small learning
rate is therefore not lost to the rounding of bfloat16 weights. Published weights are the master weights cast
to `model.dtype`, the same values that the learner's forward uses. With a LoRA adapter, only the adapter has
master weights. Frozen weights, below an adapter or of the reference, are kept in `model.dtype`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from agentrl.algorithms.linear_kernels import use_linear_kernels
from agentrl.algorithms.logprob_kernels import choose_kernels
from agentrl.algorithms.vision import attention_of_parts, find_vision
from agentrl.chat.codec import load_tokenizer
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig, ModelFromScratchConfig
from agentrl.config.model_kind import sees_images
from agentrl.errors import ConfigError, LearnerError
from agentrl.learner import sharding
from agentrl.learner.architecture import (
    check_balance,
    check_dtype,
    check_policy,
    check_value_head,
    find_own_head,
)
from agentrl.learner.attention import SEGMENT_SDPA, choose_attention, register_attention
from agentrl.learner.batch import Microbatch
from agentrl.learner.experts import divide_experts
from agentrl.learner.forward_input import ForwardInput
from agentrl.learner.images import ImageInput
from agentrl.learner.layout import check_layout
from agentrl.learner.loading import Outline, outline
from agentrl.learner.lora import (
    LowRank,
    TokenRoles,
    add_adapter,
    find_token_roles,
    initialize_adapters,
    low_ranks,
    published_name,
    read_adapters,
    switched_off,
)
from agentrl.learner.ranks import RankPlace
from agentrl.learner.routing import Routing
from agentrl.learner.score_head import SCORE_HEAD, ScoreHead, attach_score_head
from agentrl.learner.scoring import ScoreRequest, answer_scores
from agentrl.learner.segment_check import check_segments
from agentrl.learner.tensor_parallel import cut_layers
from agentrl.plugins.sources import import_source
from agentrl.servers.expert_routers import find_routers, num_layers
from agentrl.servers.weight_names import Piece, find_pieces

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PreTrainedModel

_EXPERT_LOOP = "eager"
"""transformers' loop over experts. Its grouped product computes nothing in float64 on CPUs."""
GATHERED_BYTES = 256 * 2**20
"""Of a weight that is published in pieces: gathered at a time, unless one row is larger."""


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A model; sharded on learner ranks.

    tensors: its weights by their names in the model without adapters; a tied weight appears once, under its
        first name.
    pieces: what is published, by its name in files, in sending order.
    adapters: LoRA adapters of the weights that have one, by the names of `tensors`.
    role_adapters: those of roles (`model.lora.roles`), by role.
    token_roles: which tokens have them.
    uses_adapters: False computes without them.
    sequence_group: the ranks that share each microbatch (sequence parallelism); None: not shared.
    routing: of its experts.
    images: of a model that sees; None: it does not.
    """

    module: PreTrainedModel
    class_name: str
    attention: str
    device: torch.device
    published_dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    pieces: Mapping[str, Piece]
    adapters: Mapping[str, LowRank] = field(default_factory=dict)
    role_adapters: Mapping[str, Mapping[str, LowRank]] = field(default_factory=dict)
    token_roles: TokenRoles = field(default_factory=TokenRoles)
    uses_adapters: bool = True
    sequence_group: ProcessGroup | None = None
    routing: Routing = field(default_factory=Routing)
    images: ImageInput | None = None

    def without_adapters(self) -> Policy:
        """Return the policy with its adapters switched off, i.e. as before training. Shares the weights."""
        return replace(self, uses_adapters=False)

    def score(
        self, microbatch: Microbatch, positions_A: Tensor, targets_A: Tensor, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of targets and entropies at the given positions, each f[A], with gradient.

        positions_A: i64[A], where the targets are predicted. Logits are computed for these positions only,
        one chunk at a time (see `answer_scores`), and once for a token that several sequences share.
        """
        if microbatch.has_repeated_actions:
            pairs, places_A = torch.unique(torch.stack([positions_A, targets_A]), dim=1, return_inverse=True)
            logprobs, entropies = self._score_each(microbatch, *pairs, temperature=temperature)
            return logprobs[places_A], entropies[places_A]
        return self._score_each(microbatch, positions_A, targets_A, temperature=temperature)

    def _score_each(
        self, microbatch: Microbatch, positions_A: Tensor, targets_A: Tensor, *, temperature: float
    ) -> tuple[Tensor, Tensor]:
        given = self.forward_input(microbatch, positions_A)
        self.token_roles.expect(microbatch, self.device)
        request = ScoreRequest(given.positions, given.own(targets_A), temperature)
        adapters = nullcontext() if self.uses_adapters else switched_off(self.module)
        images = nullcontext() if self.images is None else self.images.shown(microbatch, given)
        with adapters, self.routing.directed(given), images:
            logprobs, entropies = self.module(score=request, **given.arguments)
        return given.join(logprobs), given.join(entropies)

    def score_actions(self, microbatch: Microbatch, *, temperature: float) -> Tensor:
        """Return the log-probabilities of all action tokens of a microbatch, f[A], with gradient."""
        positions = torch.tensor(microbatch.predictor_positions, device=self.device)
        targets = torch.tensor(microbatch.targets, device=self.device)
        return self.score(microbatch, positions, targets, temperature=temperature)[0]

    def forward_input(self, microbatch: Microbatch, positions_P: Tensor) -> ForwardInput:
        """Return the input of this rank's forward; `positions_P` (i64[P]) are read from the output.

        Raises:
            LearnerError: the microbatch has images, and the model does not see.
        """
        if microbatch.images and self.images is None:
            raise LearnerError("an attempt shows images, and the model that scores its tokens does not see")
        return ForwardInput.of(
            microbatch,
            positions_P,
            attention=self.attention,
            device=self.device,
            group=self.sequence_group,
            experts=self.routing.read(microbatch.experts),
        )

    def reshard(self) -> None:
        """Free gathered weights after a forward without backward; the next step would make them stale."""
        sharding.reshard(self.module)

    def full_tensor(self, name: str) -> Tensor:
        """Gather one weight as published; see `full_tensors`. A collective."""
        return next(self.full_tensors([name]))[1]

    def full_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Gather weights as published, in order: adapters merged, on this device, in `published_dtype`.

        A collective: every rank takes all of them. Pieces of one weight that follow each other are gathered
        together and share memory.
        """
        for weight, group in groupby(names, key=lambda name: self.pieces[name].weight):
            own = list(group)
            if self.pieces[own[0]].shape == self.tensors[weight].shape:
                yield own[0], self._merged(weight)
                continue
            for run, begin, end in self._runs(weight, own):
                rows = sharding.gather_rows(self.tensors[weight], begin, end, self.published_dtype)
                for name in run:
                    yield name, self.pieces[name].of(rows, first_row=begin)

    def own_part(self, weight: str) -> tuple[Tensor, tuple[int, ...]]:
        """Return this rank's part of a weight with its adapter merged, and where the part begins.

        In the dtype in which the learner adds them: only the sum is rounded to `published_dtype`.
        A collective if the weight has an adapter.
        """
        own, begin = sharding.own_part(self.tensors[weight])
        adapter = self.adapters.get(weight)
        if adapter is None:
            return own, begin
        product = adapter.product()
        box = tuple(slice(first, first + size) for first, size in zip(begin, own.shape, strict=True))
        return own.to(product.dtype) + product[box], begin

    def _merged(self, weight: str) -> Tensor:
        own, _ = self.own_part(weight)
        # Rounded before it is gathered: every element is rounded by itself, and fewer bytes are sent.
        return sharding.gather_parts(own.to(self.published_dtype), self.tensors[weight])

    def _runs(self, weight: str, names: Sequence[str]) -> Iterator[tuple[list[str], int, int]]:
        """Yield names of pieces of one weight, with the first and the last row (exclusive) that contain
        them.
        """
        row = self.tensors[weight].shape[1:]
        most = max(1, GATHERED_BYTES // (math.prod(row) * self.published_dtype.itemsize))
        run: list[str] = []
        begin = end = 0
        for name in names:
            piece = self.pieces[name]
            first, last = piece.start[0], piece.start[0] + piece.extent[0]
            if run and not (begin <= first and last <= begin + most):
                yield run, begin, end
                run = []
            if not run:
                begin, end = first, last
            run.append(name)
            end = max(end, last)
        yield run, begin, end


def build_policy(
    model: ModelConfig,
    learner: LearnerConfig,
    place: RankPlace,
    *,
    from_scratch: ModelFromScratchConfig | None,
    has_backward: bool,
    master_dtype: torch.dtype,
    score_head: ScoreHead | None = None,
) -> Policy:
    """Build the model on every rank, shard it, and read the rank's part of its weights.

    A new model is equal on all ranks because of the current seed, a loaded one because of its files. So is an
    adapter: new, or read from `model.lora.path`. Weights
    that are never updated (`has_backward` False, or below adapters) are kept in `model.dtype`. With
    `score_head` the forward returns one score per segment (`reward_model.score_segments`) instead of
    log-probabilities.

    Raises:
        ConfigError: the model does not exist, has the wrong kind or dtype, or cannot be divided over ranks as
            `learner` says.
    """
    if has_backward:
        check_dtype(model)
    attention = choose_attention(
        model.attention,
        device=place.device.type,
        dtype=model.dtype,
        shares_microbatches=place.sequence_group is not None,
        shares_prefixes=learner.shared_prefix is True,
    )
    published_dtype = getattr(torch, model.dtype)
    compute_dtype = published_dtype if published_dtype != torch.float32 else None
    # Frozen weights need no master copy: no update is ever added to them. The reference of a new model must
    # be drawn as the policy is, in the same dtype.
    is_new = from_scratch is not None and from_scratch.architecture != "none"
    is_frozen = model.lora.rank > 0 or not (has_backward or is_new)
    found = outline_module(
        model,
        attention,
        compute_dtype or master_dtype if is_frozen else master_dtype,
        from_scratch=from_scratch,
        has_score_head=score_head is not None,
    )
    module = found.module
    class_name = type(module).__name__
    check_layout(module.config, model, learner)
    # Before adapters and FSDP rename weights and classes.
    pieces = find_pieces(module)
    vision = find_vision(module)
    if vision is not None:
        vision.tower.requires_grad_(False)
    elif not is_new:
        check_segments(module.config, model)
    if place.device.type == "cpu" and module.config._experts_implementation != _EXPERT_LOOP:
        module.set_experts_implementation(_EXPERT_LOOP)
    routing = Routing()
    if has_backward:  # a reference routes by itself: its log-probabilities are those before training
        routing = _routing(module, model, learner, has_score_head=score_head is not None)
    _change_layers(module, model, learner, place, score_head=score_head, dtype=master_dtype)
    sharding.shard(
        module,
        place.mesh,
        learner,
        compute_dtype=compute_dtype,
        has_backward=has_backward,
        expert_mesh=place.expert_mesh,
    )
    found.fill(sharding.home_of_weights(learner, place.device))
    initialize_adapters(module)
    if model.lora.path:
        read_adapters(module, Path(model.lora.path))
    policy = as_policy(module, class_name, attention, place.device, published_dtype, pieces)
    images = None
    if vision is not None:
        folder = Path(model.tokenizer_path or model.path)
        images = ImageInput(vision, folder, place.device, computes_always=place.world_size > 1)
    return replace(policy, sequence_group=place.sequence_group, routing=routing, images=images)


def _routing(
    module: PreTrainedModel, model: ModelConfig, learner: LearnerConfig, *, has_score_head: bool
) -> Routing:
    """Return the routing of a model that is trained."""
    routers, balance = find_routers(module), learner.balance_coefficient
    if routers and model.lora.roles:
        raise ConfigError(
            f"model.lora.roles: {model.path!r} is a mixture of experts, for which adapters of roles are not "
            "supported; use a dense model, or one adapter"
        )
    if balance > 0:
        check_balance(model, has_routers=bool(routers), has_score_head=has_score_head)
    return Routing(routers, num_layers=num_layers(module), replays=True, balance=balance)


def _change_layers(
    module: PreTrainedModel,
    model: ModelConfig,
    learner: LearnerConfig,
    place: RankPlace,
    *,
    score_head: ScoreHead | None,
    dtype: torch.dtype,
) -> None:
    """Give the model its head and adapters (of `dtype`), and cut or replace layers, in place; before FSDP."""
    if score_head is None:
        kernels = choose_kernels(learner.logprob_kernels, device=place.device.type)
        answer_scores(module, chunk_tokens=learner.logprob_chunk_tokens, kernels=kernels)
    if model.lora.rank > 0:
        add_adapter(module, model.lora, dtype=dtype)
    if score_head is not None:
        attach_score_head(module, score_head, dtype=dtype)
    if place.tensor_mesh is not None:
        cut_layers(module, place.tensor_mesh)
    elif not learner.compile:
        use_linear_kernels(module, learner.linear_kernels, device=place.device.type)
    if place.expert_mesh is not None:
        tensor_group = None if place.tensor_mesh is None else place.tensor_mesh.get_group()
        divide_experts(module, place.expert_mesh[sharding.EXPERT], tensor_group=tensor_group)


def has_dropout(module: nn.Module) -> bool:
    """Return whether forwards in train mode drop anything: then they differ from those in eval mode."""
    rates = [rate for child in module.modules() for name, rate in vars(child).items() if "dropout" in name]
    own = [child.p for child in module.modules() if isinstance(child, nn.Dropout)]
    return any(isinstance(rate, int | float) and rate > 0 for rate in [*rates, *own])


def can_share_prefixes(policy: Policy) -> bool:
    """Return whether segments may continue others."""
    is_whole = policy.sequence_group is None
    return policy.attention == SEGMENT_SDPA and is_whole and not policy.role_adapters


def as_policy(
    module: PreTrainedModel,
    class_name: str,
    attention: str,
    device: torch.device,
    published_dtype: torch.dtype,
    pieces: Mapping[str, Piece],
) -> Policy:
    """Wrap a model whose parameters are final, i.e. after sharding and after adding adapters.

    pieces: of the model before (see `find_pieces`).

    Raises:
        ConfigError: an adapter is on a weight that is tied to another.
    """
    tensors, adapters = _tensors(module), low_ranks(module)
    missing = sorted(set(adapters) - set(tensors))
    if missing:
        raise ConfigError(
            f"model.lora.target_modules names the layer of {missing[0]!r}, whose weight is tied to another "
            "layer's; remove it"
        )
    published = {name: piece for name, piece in pieces.items() if piece.weight in tensors}
    roles = find_token_roles(module)
    return Policy(
        module,
        class_name,
        attention,
        device,
        published_dtype,
        tensors,
        published,
        adapters,
        {name: low_ranks(module, name) for name in roles.names},
        roles,
    )


def outline_module(
    model: ModelConfig,
    attention: str,
    dtype: torch.dtype,
    *,
    from_scratch: ModelFromScratchConfig | None,
    has_score_head: bool = False,
) -> Outline:
    """Return the model of `model.path` without its stored weights, or a new one on the CPU; no adapters.

    has_score_head: load a sequence classifier with one label instead of a causal language model.

    Raises:
        ConfigError: the model does not exist, its sizes or its head are wrong, or its files do not fit.
        PluginError: `model.external_lib` cannot be imported.
    """
    if model.external_lib is not None:
        import_source(model.external_lib)
    register_attention()
    if from_scratch is not None and from_scratch.architecture != "none":
        return Outline(_new_model(model, from_scratch, attention, dtype, has_score_head=has_score_head))
    return _outline_stored(model, attention, dtype, has_score_head=has_score_head)


def _outline_stored(
    model: ModelConfig, attention: str, dtype: torch.dtype, *, has_score_head: bool
) -> Outline:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    if has_score_head:
        check_value_head(model)
    else:
        check_policy(model)
    sees = sees_images(Path(model.path))
    language_model = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    is_new_head = has_score_head and find_own_head(model) is None
    try:
        return outline(
            AutoModelForSequenceClassification if has_score_head else language_model,
            model,
            attention=attention_of_parts(attention) if sees else attention,
            dtype=dtype,
            num_labels=1 if has_score_head else None,
            new_head=SCORE_HEAD if is_new_head else None,
        )
    except (OSError, ValueError, RuntimeError) as error:
        called = "sequence classifier with one label" if has_score_head else "causal language model"
        raise ConfigError(f"model.path={model.path!r} cannot be loaded as a {called}: {error}") from error


def _new_model(
    model: ModelConfig,
    from_scratch: ModelFromScratchConfig,
    attention: str,
    dtype: torch.dtype,
    *,
    has_score_head: bool,
) -> PreTrainedModel:
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        Qwen2Config,
        Qwen3MoeConfig,
    )

    kind: Any = {"qwen2": Qwen2Config, "qwen3_moe": Qwen3MoeConfig}[from_scratch.architecture]
    sizes = dict(from_scratch.sizes)
    known = {field.name for field in fields(kind)} | set(kind().to_dict())
    unknown = sorted(set(sizes) - known)
    if unknown:
        raise ConfigError(
            f"from_scratch.sizes has the unknown key {unknown[0]!r}; its keys are those of transformers' "
            f"{kind.__name__}"
        )
    if "vocab_size" not in sizes:
        sizes["vocab_size"] = _vocabulary_size(model)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if has_score_head:
        return AutoModelForSequenceClassification.from_config(kind(**{**sizes, "num_labels": 1}), **options)
    return AutoModelForCausalLM.from_config(kind(**sizes), **options)


def _vocabulary_size(model: ModelConfig) -> int:
    file = Path(model.tokenizer_path or model.path) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{file} does not exist; set model.tokenizer_path to the folder of a tokenizer, or "
            "from_scratch.sizes.vocab_size"
        )
    return load_tokenizer(file.parent).get_vocab_size(with_added_tokens=True)


def _tensors(module: PreTrainedModel) -> dict[str, Tensor]:
    """Return tensors by their name without adapters, each shared one once.

    FSDP keeps these tensor objects for the life of the model, so references to them stay valid.
    """
    by_id: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        published = published_name(name)
        if published is not None:
            by_id.setdefault(id(tensor), (published, tensor))
    return dict(by_id.values())
