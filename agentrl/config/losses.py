"""`Loss`: a policy loss, and all that the program knows of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from agentrl.config.section import Section
from agentrl.registered import named

if TYPE_CHECKING:
    from agentrl.config.algorithm import AlgorithmConfig

GROUP = "agentrl.policy_losses"
"""Entry points: name -> `Loss`, or a function alone."""

Sees = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Tokens of the whole update that are selected by their covariance before it.

    share: of the update's loss tokens, at least one token.
    lower, upper: bounds of the covariance, both excluded.
    by: `largest` takes the largest covariances, `chance` any within the bounds.
    """

    share: float
    by: Literal["largest", "chance"]
    lower: float = -math.inf
    upper: float = math.inf


def _nothing(algorithm: AlgorithmConfig) -> None:
    return None


def _no_words(algorithm: AlgorithmConfig) -> str:
    return ""


def _no_warnings(algorithm: AlgorithmConfig, updates: int) -> Iterator[str]:
    return iter(())


@dataclass(frozen=True, slots=True)
class Loss:
    """A policy loss.

    name: the value of `algorithm.policy_loss`.
    function: `f(tokens: PolicyTokens, **options) -> PolicyLoss`, or its place as `module:function`, so that
    reading a config imports no torch.
    Options: the keys of `algorithm.loss_options`; None: they reach the function unchecked.
    from_config: returns the function's options instead, from keys that `algorithm` has for this loss.
    keys: the section of `algorithm` that only this loss reads.
    sees: whether the loss of a token depends on the policy at that token alone, or on its whole sequence.
    selects: returns which tokens it needs selected (`PolicyTokens.is_selected`).
    objection: returns why it cannot be used with the rest of `algorithm`.
    words, bound: its settings, and the bound of its ratio, for `config explain`.
    warnings: what works but is probably a mistake, at a number of updates per step.
    """

    name: str
    function: str | Callable[..., Any]
    Options: type[Section] | None = None
    from_config: Callable[[AlgorithmConfig], Mapping[str, Any]] | None = None
    keys: str | None = None
    sees: Sees | Callable[[AlgorithmConfig], Sees] = "sequence"
    selects: Callable[[AlgorithmConfig], TokenSelection | None] = _nothing
    objection: Callable[[AlgorithmConfig], str | None] = _nothing
    words: Callable[[AlgorithmConfig], str] = _no_words
    bound: Callable[[AlgorithmConfig], str] = _no_words
    warnings: Callable[[AlgorithmConfig, int], Iterator[str]] = _no_warnings

    def arguments(self, algorithm: AlgorithmConfig) -> Mapping[str, Any]:
        """Return the function's options in this config.

        Raises:
            ValueError: `algorithm.loss_options` are not its options.
        """
        given = algorithm.loss_options
        if self.from_config is not None:
            if given:
                raise ValueError(
                    f"loss_options are for a policy loss of your own; {self.name} has its own keys"
                )
            return self.from_config(algorithm)
        if self.Options is None:
            return given
        try:
            checked = self.Options(**given)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(["loss_options", *map(str, first["loc"])])
            known = ", ".join(self.Options.model_fields)
            raise ValueError(f"{key}: {first['msg']}; {self.name} takes {known}") from None
        return {name: getattr(checked, name) for name in self.Options.model_fields}

    def sees_sequences(self, algorithm: AlgorithmConfig) -> bool:
        return (self.sees(algorithm) if callable(self.sees) else self.sees) == "sequence"


def loss_named(name: str) -> Loss:
    """Return the loss that a package registers; for `file.py:NAME` a stand-in that names it.

    Raises:
        PluginError, ConfigError: see `agentrl.registered.named`.
    """
    if ":" in name:
        return Loss(name, name)
    found = named("policy loss", name, group=GROUP)
    return found if isinstance(found, Loss) else Loss(name, found)
