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


@cache
def find_loss(name: str) -> Loss:
    """Return the loss of `algorithm.policy_loss` with its function imported.

    Raises:
        PluginError: no package registers the name (the message lists the known ones), its import fails, or
            it is not a function.
    """
    loss = loss_named(name)
    return replace(loss, function=_function("policy loss", name, at_place(loss.function)))


@cache
def find_estimator(name: str) -> Estimator:
    """Return the estimator of `algorithm.advantage` with its functions imported.

    Raises:
        PluginError: as `find_loss`.
    """
    estimator = estimator_named(name)
    function = _function("advantage estimator", name, at_place(estimator.function))
    separate = None if estimator.separate is None else at_place(estimator.separate)
    return replace(estimator, function=function, separate=separate)


def _function(kind: str, name: str, found: Any) -> Callable[..., Any]:
    if isinstance(found, (Loss, Estimator)):  # a config is checked before a file is imported
        raise PluginError(
            f"{kind} {name!r} is a {type(found).__name__}: register it as an entry point, or name its "
            "function"
        )
    if not callable(found):
        raise PluginError(f"{kind} {name!r} is {type(found).__name__}, not a function")
    return found
