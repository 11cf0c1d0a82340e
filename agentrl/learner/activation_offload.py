"""Offloading of activations: the inputs of recomputed layers wait for the backward in the host's memory.

With gradient checkpointing, autograd keeps only the input of each layer, [T, H], from forward to backward. Of
long contexts these are most of the activations: 128k tokens, 64 layers and 5,120 columns in bfloat16 are
86 GB. They are copied to the host while the next layers compute, and back while the backward of the layer
behind is at work. On a GPU both happen on a stream of their own. The values do not change by a bit.

The last layer keeps its input where it is: the backward begins with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def offload_inputs(layers: Sequence[nn.Module]) -> None:
    """Let the layers, in the order of the forward, keep their inputs on the host until the backward.

    Their forwards must be wrapped for gradient checkpointing already.
    """
    chain = _Chain()
    for index, layer in enumerate(layers[:-1]):
        layer.forward = partial(_forward, layer.forward, chain, index == 0)


def _forward(
    forward: Callable[..., Any], chain: _Chain, is_first: bool, hidden: Tensor, *args: Any, **options: Any
) -> Any:
    # Not the tensor itself: the graph keeps `pack`, and with it what it reads.
    address, shape = hidden.data_ptr(), hidden.shape

    def pack(saved: Tensor) -> Tensor | _HostCopy:
        # Rotary embeddings and masks are shared by all layers, and stay.
        is_input = saved.data_ptr() == address and saved.shape == shape
        return chain.append(saved, is_first=is_first) if is_input else saved

    # Inside, the checkpoint has hooks of its own: these here see only what it keeps of the layer.
    with saved_tensors_hooks(pack, _unpack):
        return forward(hidden, *args, **options)


def _unpack(kept: Tensor | _HostCopy) -> Tensor:
    return kept.take() if isinstance(kept, _HostCopy) else kept


class _Chain:
    """The copies of a forward, in its order."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        # Weak, because the graph owns them: after the backward nothing may keep a whole context's input.
        self._last: weakref.ref[_HostCopy] | None = None

    def append(self, tensor: Tensor, *, is_first: bool) -> _HostCopy:
        if tensor.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        before = None if is_first or self._last is None else self._last()
        copy = _HostCopy(tensor, before, self._stream)
        self._last = weakref.ref(copy)
        return copy


class _HostCopy:
    """The input of one layer in the host's memory.

    before: of the layer in front of it, whose backward comes next; None: there is none.
    stream: of the copies; None on a CPU.
    """

    def __init__(self, tensor: Tensor, before: _HostCopy | None, stream: torch.cuda.Stream | None) -> None:
        self._device = tensor.device
        self._before = before
        self._stream = stream
        self._fetched: Tensor | None = None
        self._arrival: torch.cuda.Event | None = None
        tensor = tensor.detach()
        self._host = torch.empty_like(tensor, device="cpu", pin_memory=stream is not None)
        if stream is None:
            self._host.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(tensor, non_blocking=True)
        # Its memory is not given to others before the copy is made.
        tensor.record_stream(stream)

    def take(self) -> Tensor:
        """Return the input on its device, and let the one in front of it come."""
        self._fetch()
        if self._before is not None:
            self._before._fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None, "it was fetched above"
        if self._arrival is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._arrival)
            fetched.record_stream(current)
        return fetched

    def _fetch(self) -> None:
        if self._fetched is not None:
            return
        if self._stream is None:
            self._fetched = self._host.clone()
            return
        with torch.cuda.stream(self._stream):
            self._fetched = self._host.to(self._device, non_blocking=True)
            self._arrival = self._stream.record_event()
