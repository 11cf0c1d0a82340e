"""Loading of a model by ranks that each hold a part of it.

`outline` builds a model whose stored weights are on the meta device, i.e. have a shape but no memory.
Everything else of it, such as rotary frequencies and a new head, is computed. The learner then shards the
model, and `Outline.fill` reads the slices that this rank owns. Names and fused weights are mapped by the
rules of transformers, and so are tied weights and what may be missing.

Some folders are loaded whole by each rank, as transformers loads them: those without safetensors, quantized
ones, and those whose weights transformers converts in other ways than by stacking and concatenating them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentrl.config.model import ModelConfig
from agentrl.data.weight_files import SINGLE
from agentrl.errors import ConfigError
from agentrl.learner.lora import published_name
from agentrl.learner.sharding import own_part
from agentrl.learner.stored_weights import CHUNK_BYTES, SliceReader, StoredTensor, find_stored
from agentrl.servers.weight_names import Source, find_sources

if TYPE_CHECKING:  # takes seconds to import; the controller needs only the names of this module
    from transformers import PreTrainedModel

_MAX_NAMES = 8
"""Named in an error of each kind of problem."""


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A model whose stored weights are not read yet.

    module: the weights in `sources` are on the meta device; a model that was loaded whole has none.
    """

    module: PreTrainedModel
    sources: Mapping[str, Source] = field(default_factory=dict)
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)

    @torch.no_grad()
    def fill(self, device: torch.device) -> None:
        """Allocate weights on `device`, and read this rank's slices of everything that is stored.

        Adapters are allocated, but have no values yet. No collective.

        Raises:
            ConfigError: a file has become unreadable.
        """

        def allocate(tensor: Tensor) -> Tensor:
            return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

        # Not `to_empty`, which would also discard what is computed. FSDP updates its references in `_apply`.
        with _swapped():
            self.module._apply(allocate)
        left = set(self.sources)
        with SliceReader() as reader:
            for name, tensor in _named_tensors(self.module):
                published = published_name(name)
                if published in left:
                    left.remove(published)
                    self._read(self.sources[published], tensor, reader)
        assert not left, f"{min(left)} is stored, but is not in the model"

    def _read(self, source: Source, tensor: Tensor, reader: SliceReader) -> None:
        own, offset = own_part(tensor)
        for part in source.parts:
            sides = list(zip(offset, own.shape, part.start, part.shape, strict=True))
            first = [max(begin, start) for begin, _, start, _ in sides]
            last = [min(begin + size, start + extent) for begin, size, start, extent in sides]
            if any(a >= b for a, b in zip(first, last, strict=True)):
                continue
            inside = tuple(slice(a - o, b - o) for a, b, o in zip(first, last, offset, strict=True))
            within_part = [a - start for a, start in zip(first, part.start, strict=True)]
            reader.read(self.stored[part.name], part.shape, within_part, own[inside])


def outline(
    kind: Any,
    model: ModelConfig,
    *,
    attention: str | Mapping[str, str],
    dtype: torch.dtype,
    num_labels: int | None = None,
    new_head: str | None = None,
) -> Outline:
    """Return the model in `model.path` without its stored weights.

    Args:
        kind: transformers' auto class.
        attention: a name, or one for each part of the config.
        num_labels: of a classifier, instead of the config's.
        new_head: name of a layer that the files do not contain; it is initialized from the current seed.

    Raises:
        ConfigError: the folder lacks weights of the model, has others or other shapes, or is damaged.
        OSError, ValueError, RuntimeError: transformers cannot build the model.
    """
    from transformers import AutoConfig

    options = {} if num_labels is None else {"num_labels": num_labels}
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, **options)
    is_quantized = getattr(config, "quantization_config", None) is not None
    single = getattr(config, "transformers_weights", None) or SINGLE
    stored = {} if is_quantized else find_stored(Path(model.path), single=single)
    if not stored:
        return _load_whole(kind, model, attention=attention, dtype=dtype, new_head=new_head, **options)
    config.name_or_path = model.path
    module = build_on_meta(kind, config, model, attention=attention, dtype=dtype)
    found = find_sources(module, {name: tensor.shape for name, tensor in stored.items()})
    if found is None:
        return _load_whole(kind, model, attention=attention, dtype=dtype, new_head=new_head, **options)
    sources, surplus = found
    _set_dtypes(module, sources, dtype)
    _tie(module, sources, stored)
    _complete(module, sources, surplus, model, new_head=new_head)
    module.eval()
    if module.can_generate() and hasattr(module, "adjust_generation_fn"):
        _read_generation_config(module, model)
    return Outline(module, sources, stored)


def build_on_meta(
    kind: Any, config: Any, model: ModelConfig, *, attention: str | Mapping[str, str], dtype: torch.dtype
) -> PreTrainedModel:
    """Return the model with its weights on the meta device, none of them tied, and computed buffers."""
    from transformers import initialization

    with ExitStack() as stack:
        stack.enter_context(_weights_on_meta())
        stack.enter_context(initialization.no_init_weights())
        stack.enter_context(initialization.no_tie_weights())
        module: PreTrainedModel = kind.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=model.trust_remote_code
        )
    return module


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Let every module that is built move its weights to the meta device.

    Not with torch's device context, as transformers does: it leaves buffers without values, and a model's own
    code may compute them nowhere but where it is built.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, weight: nn.Parameter | None) -> None:
        register(module, name, weight)
        if weight is not None and not weight.is_meta:
            empty = nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
            module._parameters[name] = empty

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _set_dtypes(module: PreTrainedModel, names: Iterable[str], dtype: torch.dtype) -> None:
    """Give the weights that an architecture keeps in float32 that dtype."""
    from transformers.core_model_loading import build_glob_alternation

    plan = module._get_dtype_plan(dtype)
    if not plan:
        return
    matches, pattern_of_group, _ = build_glob_alternation(list(plan))
    for name in names:
        found = matches.search(name)
        if found is not None:
            tensor = module.get_parameter_or_buffer(name)
            tensor.data = tensor.data.to(plan[pattern_of_group[str(found.lastgroup)]])


def _tie(module: PreTrainedModel, sources: dict[str, Source], stored: Mapping[str, StoredTensor]) -> None:
    """Decide which of the weights that the config ties are one weight, and drop the second copy of it.

    Two copies that differ are two weights, whatever the config says; so it is in transformers.
    """
    for second, first in list(module.all_tied_weights_keys.items()):
        if second not in sources or first not in sources:
            continue
        dtype = module.get_parameter_or_buffer(first).dtype
        if _are_equal(sources[first], sources[second], stored, dtype):
            del sources[second]
        else:
            del module.all_tied_weights_keys[second]
            logging.getLogger(__name__).warning(
                "the config ties %s to %s, but the files have different values of them: they are not tied",
                second,
                first,
            )
    for name in sources:
        # transformers initializes what does not have this mark.
        module.get_parameter_or_buffer(name)._is_hf_initialized = True  # type: ignore[attr-defined]


@torch.no_grad()
def _are_equal(left: Source, right: Source, stored: Mapping[str, StoredTensor], dtype: torch.dtype) -> bool:
    if left.shape != right.shape or len(left.parts) != 1 or len(right.parts) != 1:
        return False
    shape = left.shape
    num_rows = max(1, CHUNK_BYTES // max(1, dtype.itemsize * torch.Size(shape[1:]).numel()))
    with SliceReader() as reader:
        for begin in range(0, shape[0], num_rows):
            size = (min(num_rows, shape[0] - begin), *shape[1:])
            both = torch.empty(2, *size, dtype=dtype)
            for out, source in zip(both, (left, right), strict=True):
                reader.read(stored[source.parts[0].name], shape, (begin, *(0 for _ in shape[1:])), out)
            if not torch.equal(both[0], both[1]):
                return False
    return True


def _complete(
    module: PreTrainedModel,
    sources: Mapping[str, Source],
    surplus: Mapping[str, str],
    model: ModelConfig,
    *,
    new_head: str | None,
) -> None:
    """Tie weights, and compute what is not stored, such as a new head.

    Raises:
        ConfigError: see `outline`.
    """
    weights = module.state_dict()
    # By object, because a module of custom code may be in the model twice.
    missing = {
        name
        for name in weights
        if not getattr(module.get_parameter_or_buffer(name), "_is_hf_initialized", False)
    }
    module.tie_weights(missing_keys=missing, recompute_mapping=False)
    unmet: Any = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(surplus.values()))
    module._adjust_missing_and_unexpected_keys(unmet)  # removes what the architecture can do without
    wrong = {
        name: (source.shape, tuple(weights[name].shape))
        for name, source in sources.items()
        if source.shape != tuple(weights[name].shape)
    }
    _check(
        model,
        type(module).__name__,
        missing=sorted(
            name for name in unmet.missing_keys if new_head is None or not name.startswith(f"{new_head}.")
        ),
        surplus=sorted(
            name
            for name, own in surplus.items()
            if own in unmet.unexpected_keys and not _is_replaced(module, own)
        ),
        wrong=wrong,
    )
    for name in sorted(missing):
        if isinstance(module.get_parameter_or_buffer(name), nn.Parameter):
            _put_on_cpu(module, name)
    module.initialize_weights()  # only what has no mark


def _is_replaced(module: PreTrainedModel, name: str) -> bool:
    """Return whether a weight belongs to the head over the vocabulary, which a classifier does not have."""
    return name.startswith("lm_head.") and module.get_output_embeddings() is None


def _check(
    model: ModelConfig,
    class_name: str,
    *,
    missing: Sequence[str],
    surplus: Sequence[str],
    wrong: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    problems = []
    if missing:
        problems.append(f"lacks {_count(missing)}")
    if surplus:
        problems.append(f"has {_count(surplus)} that the model does not have")
    if wrong:
        shapes = [f"{name} {list(own)} instead of {list(right)}" for name, (own, right) in wrong.items()]
        problems.append(f"has wrong shapes: {_listed(shapes)}")
    if problems:
        raise ConfigError(
            f"model.path={model.path!r} does not fit its config.json ({class_name}): it "
            f"{'; it '.join(problems)}; use the folder of a complete model"
        )


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} weight{'s' if len(names) > 1 else ''} ({_listed([repr(n) for n in names])})"


def _listed(items: Sequence[str]) -> str:
    more = len(items) - _MAX_NAMES
    return ", ".join(items[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _put_on_cpu(module: PreTrainedModel, name: str) -> None:
    path, _, own = name.rpartition(".")
    weight = module.get_parameter(name)
    empty = nn.Parameter(torch.empty_like(weight, device="cpu"), requires_grad=weight.requires_grad)
    setattr(module.get_submodule(path), own, empty)


def _read_generation_config(module: PreTrainedModel, model: ModelConfig) -> None:
    options = dict.fromkeys(("cache_dir", "proxies", "token", "revision"))
    adjust: Any = module.adjust_generation_fn
    adjust(
        None,
        True,
        None,
        model.path,
        force_download=False,
        local_files_only=True,
        subfolder="",
        trust_remote_code=model.trust_remote_code,
        **options,
    )


def _load_whole(
    kind: Any,
    model: ModelConfig,
    *,
    attention: str | Mapping[str, str],
    dtype: torch.dtype,
    new_head: str | None,
    **options: Any,
) -> Outline:
    with _without_report():
        module, info = kind.from_pretrained(
            model.path,
            output_loading_info=True,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=model.trust_remote_code,
            **options,
        )
    is_new = [] if new_head is None else [n for n in info["missing_keys"] if n.startswith(f"{new_head}.")]
    _check(
        model,
        type(module).__name__,
        missing=sorted(set(info["missing_keys"]) - set(is_new)),
        surplus=sorted(name for name in info["unexpected_keys"] if not _is_replaced(module, name)),
        wrong={},  # transformers raises
    )
    return Outline(module)


@contextmanager
def _without_report() -> Iterator[None]:
    """Suppress transformers' report of weights that do not fit: what is wrong is raised here."""
    logger = logging.getLogger("transformers.modeling_utils")
    # A filter, not a higher level: the level also controls other checks of transformers.
    logger.addFilter(_is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_report)


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


@contextmanager
def _swapped() -> Iterator[None]:
    """Let conversions of a module keep its weights as objects, so that tied weights stay one."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
