"""The functions of losses and estimators: those that packages register, and the user's own by their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from agentrl.config.estimators import Estimator, estimator_named
from agentrl.config.losses import Loss, loss_named
from agentrl.errors import PluginError
from agentrl.plugins.sources import at_place


def find_loss(name: str) -> Loss:
    """Return the loss of `algorithm.policy_loss` with its function imported.

    Raises:
        PluginError: no package registers the name (the message lists the known ones), its import fails, or
            it is not a function.
    """
    loss = loss_named(name)
    found = at_place(loss.function)
    if isinstance(found, Loss):
        loss, found = found, at_place(found.function)
    return replace(loss, function=_function("policy loss", name, found))


@cache
def find_estimator(name: str) -> Estimator:
    """Return the estimator of `algorithm.advantage` with its functions imported.

    Raises:
        PluginError: as `find_loss`.
    """
    estimator = estimator_named(name)
    found = at_place(estimator.function)
    if isinstance(found, Estimator):
        estimator, found = found, at_place(found.function)
    function = _function("advantage estimator", name, found)
    separate = None if estimator.separate is None else at_place(estimator.separate)
    return replace(estimator, function=function, separate=separate)


def _function(kind: str, name: str, found: Any) -> Callable[..., Any]:
    if not callable(found):
        raise PluginError(f"{kind} {name!r} is {type(found).__name__}, not a function")
    return found
