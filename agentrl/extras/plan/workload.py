"""The workload of a simulation: what each attempt samples, and how long its tools take."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Protocol

from agentrl.extras.plan.draws import Draws

_NORMAL = NormalDist()


class Distribution(Protocol):
    """Draws a number. `shared` is a normal deviate that the members of a group have in common."""

    def draw(self, rng: random.Random, shared: float) -> float: ...


@dataclass(frozen=True, slots=True)
class TurnScript:
    """One turn: tokens to sample, and the tool call that follows it; the last turn has none.

    tool_s: latency of the tool call; inf: it hangs.
    tool_tokens: of its output.
    """

    tokens: int
    tool_s: float = 0.0
    tool_tokens: int = 0
    does_tool_fail: bool = False


@dataclass(frozen=True, slots=True)
class Script:
    """One attempt: its prompt, its turns and its reward."""

    prompt_tokens: int
    turns: tuple[TurnScript, ...]
    reward: float


@dataclass(frozen=True, slots=True)
class Workload:
    """The distribution of attempts.

    Lengths are in tokens of the simulation, each of which stands for `grain` real ones.

    tool_hang, tool_failure: shares of tool calls that never return, or that fail the attempt.
    pass_rate: share of attempts with reward 1; the others have reward 0.
    max_tokens: of an attempt, prompt not included.
    """

    turns: Distribution
    turn_tokens: Distribution
    prompt_tokens: Distribution
    tool_s: Distribution
    tool_tokens: Distribution
    max_tokens: int
    grain: int = 1
    tool_hang: float = 0.0
    tool_failure: float = 0.0
    pass_rate: float = 0.5


class ScriptSource(Protocol):
    """Says what attempts do."""

    def next(self, group_id: int, member: int) -> Script:
        """Return the script of the next attempt of a member."""


class Scripts:
    """Draws the script of each visit to a member of a group. The first visit has the same script in all runs
    with this seed.
    """

    def __init__(self, workload: Workload, draws: Draws) -> None:
        self._workload = workload
        self._draws = draws
        self._visits: Counter[tuple[int, int]] = Counter()

    def next(self, group_id: int, member: int) -> Script:
        """Return the script of the next attempt of a member."""
        visit = self._visits[group_id, member]
        self._visits[group_id, member] += 1
        own = self._workload
        of_group = self._draws.of("group", group_id)
        shared = of_group.gauss(0.0, 1.0)
        prompt = self._tokens(own.prompt_tokens.draw(of_group, shared))
        rng = self._draws.of("attempt", group_id, member, visit)
        num_turns = max(1, round(own.turns.draw(rng, shared)))
        left, turns = max(1, own.max_tokens // own.grain), []
        for index in range(num_turns):
            tokens = min(left, self._tokens(own.turn_tokens.draw(rng, shared)))
            latency, output = own.tool_s.draw(rng, shared), self._tokens(own.tool_tokens.draw(rng, shared))
            fate = rng.random()
            left -= tokens + output
            is_last = index == num_turns - 1 or left < 1
            if is_last:
                turns.append(TurnScript(tokens))
                break
            does_hang = fate < own.tool_hang
            does_fail = not does_hang and fate < own.tool_hang + own.tool_failure
            turns.append(TurnScript(tokens, float("inf") if does_hang else latency, output, does_fail))
        return Script(prompt, tuple(turns), float(rng.random() < own.pass_rate))

    def _tokens(self, drawn: float) -> int:
        return max(1, round(drawn / self._workload.grain))


Kind = Literal["fixed", "lognormal", "exponential", "uniform", "samples"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A distribution by its kind.

    mean: of all kinds but samples. sigma: of a lognormal's logarithm. most: larger numbers are cut.
    group_share: with lognormal and samples, part of the variance of the normal deviate behind a draw that the
        members of a group have in common.
    samples: the values to draw from, in ascending order.
    """

    kind: Kind
    mean: float = 0.0
    sigma: float = 0.0
    most: float = float("inf")
    group_share: float = 0.0
    samples: Sequence[float] = ()

    def draw(self, rng: random.Random, shared: float) -> float:
        return min(self.most, self._draw(rng, shared))

    def _draw(self, rng: random.Random, shared: float) -> float:
        match self.kind:
            case "fixed":
                return self.mean
            case "exponential":
                return rng.expovariate(1 / self.mean) if self.mean else 0.0
            case "uniform":
                return rng.uniform(0.0, 2 * self.mean)
            case "samples":
                quantile = _NORMAL.cdf(self._deviate(rng, shared))
                return self.samples[min(len(self.samples) - 1, int(quantile * len(self.samples)))]
            case "lognormal":
                deviate = self._deviate(rng, shared)
                return self.mean * math.exp(self.sigma * deviate - self.sigma**2 / 2)

    def _deviate(self, rng: random.Random, shared: float) -> float:
        """Return a normal deviate, of which the members of a group have a part in common."""
        return self.group_share**0.5 * shared + (1 - self.group_share) ** 0.5 * rng.gauss(0.0, 1.0)
