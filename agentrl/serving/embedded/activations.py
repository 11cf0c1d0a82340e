"""Detection of overflows inside a model.

Finite logits are not enough. A norm maps activations whose squares overflow to zeros, and the model then
samples from meaningless, finite logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


class Activations:
    """Watches the outputs of all modules from `start` to `stop`.

    No forward may run while either is called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.are_finite = True

    def start(self) -> None:
        self.are_finite = True
        self._hooks = [module.register_forward_hook(self._look) for module in self._model.modules()]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            self.are_finite &= bool(torch.isfinite(tensor.float().square()).all())


def _tensors(output: Any) -> Iterator[Tensor]:
    for part in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(part, Tensor) and part.is_floating_point():
            yield part
