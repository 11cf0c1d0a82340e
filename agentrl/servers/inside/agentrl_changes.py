"""A weight loader for SGLang that applies a file of changed elements to the weights that the server has.

    PYTHONPATH=.../agentrl/sglang/inside python -m sglang.launch_server \\
        --custom-weight-loader agentrl_changes.load_changes

SGLang's models know where each weight of a checkpoint belongs: in which fused layer, and which rows or
columns of it this tensor-parallel rank has. They find the place by narrowing both sides, and then copy whole
tensors. `load_changes` gives them tensors without values, which record how they were narrowed. A copy from
such a tensor writes only the changed elements. So the sparse file needs no knowledge of the model's layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

_POSITIONS, _VALUES = "|positions", "|values"
_REPACKED = ("use_flashinfer_trtllm_moe",)
"""Marks of layers that compute with another layout than they load."""


def load_changes(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Apply the file of changes whose path is the only given tensor, u8[n].

    An error ends the server, which must not sample with a mix of old and new weights.

    Raises:
        ValueError: a layer's layout is not the one that it loads, or a loader does more than narrow a weight.
    """
    [(_, path)] = named_tensors
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if any(getattr(method, mark, False) for mark in _REPACKED):
            raise ValueError(
                f"{name} keeps its weights in another layout than it loads, so single elements have no place "
                "in it; use rollout.weights.delta=false"
            )
    with safe_open(bytes(path.cpu().tolist()).decode(), framework="pt") as file, torch.no_grad():
        model.load_weights(_read(file))


def _read(file: Any) -> Iterator[tuple[str, Tensor]]:
    shapes = json.loads(file.metadata()["shapes"])
    for key in file.keys():  # noqa: SIM118 - not a mapping
        if key.endswith(_VALUES):
            name = key.removesuffix(_VALUES)
            yield name, changed(shapes[name], file.get_tensor(name + _POSITIONS), file.get_tensor(key))
        elif not key.endswith(_POSITIONS):
            yield key, file.get_tensor(key)


def changed(shape: Sequence[int], positions: Tensor, values: Tensor) -> Tensor:
    """Return a tensor of `shape` of which only the elements at `positions` (of the flat tensor) are known."""
    return _follow(torch.empty(tuple(shape), dtype=values.dtype, device="meta"), positions, values)


def _follow(view: Tensor, positions: Tensor, values: Tensor) -> Tensor:
    tensor: Any = view if isinstance(view, _Changed) else view.as_subclass(_Changed)
    tensor.changes = positions, values
    return tensor


_VIEWS = {"narrow", "chunk", "split", "view", "transpose", "t", "permute", "unsqueeze", "squeeze", "select"}
_VIEWS |= {"__getitem__", "unflatten", "unbind", "detach", "tensor_split"}
_SAME = {"to", "cpu", "cuda", "contiguous", "clone", "type", "float", "half", "bfloat16"}
"""Copies: only the values that are written are converted and moved."""
_FACTS = {"__get__", "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "__len__"}
_FACTS |= {"storage_offset", "is_contiguous", "is_floating_point", "__repr__", "__hash__", "untyped_storage"}


class _Changed(Tensor):
    """A view of a weight without values; `changes` has the positions and values of the whole weight.

    The strides and the offset of the view say which positions of the weight are where in the view.
    """

    changes: tuple[Tensor, Tensor]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name == "copy_" and not isinstance(args[0], cls):
            return args[1]._write(args[0])
        if name == "__setitem__" and not isinstance(args[0], cls) and _is_basic(args[1]):
            return args[2]._write(args[0][args[1]])
        if not isinstance(args[0], cls) or name not in _VIEWS | _SAME | _FACTS:
            raise ValueError(
                f"a weight loader of this model uses {name!r}, which sparse changes do not support; use "
                "rollout.weights.delta=false"
            )
        if name in _SAME:
            return args[0]
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Tensor):
            return _follow(result, *args[0].changes)
        if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
            return type(result)(_follow(part, *args[0].changes) for part in result)
        return result

    def _write(self, target: Tensor) -> Tensor:
        """Write the changed elements of this view into a tensor of the same shape."""
        if target.shape != self.shape:
            raise ValueError(f"a weight of {list(self.shape)} does not fit into {list(target.shape)}")
        positions, values = (part.to(target.device) for part in self.changes)
        inside, indices = _places(positions.long(), self.shape, self.stride(), int(self.storage_offset()))
        target[tuple(index[inside] for index in indices)] = values[inside].to(target.dtype)
        return target


def _is_basic(key: Any) -> bool:
    """Return whether indexing with `key` returns a view."""
    return all(isinstance(part, (int, slice)) for part in (key if isinstance(key, tuple) else (key,)))


def _places(
    positions: Tensor, shape: Sequence[int], strides: Sequence[int], offset: int
) -> tuple[Tensor, list[Tensor]]:
    """Return which positions (i64[n]) of a contiguous tensor are in a view of it, and their indices there."""
    rest = positions - offset
    inside = rest >= 0
    indices = [torch.zeros_like(positions)] * len(shape)
    for dim in sorted(range(len(shape)), key=lambda dim: -strides[dim]):
        if shape[dim] != 1:  # the stride of such a dimension says nothing
            indices[dim] = rest // strides[dim]
            inside &= indices[dim] < shape[dim]
            rest = rest - indices[dim] * strides[dim]
    return inside & (rest == 0), indices
