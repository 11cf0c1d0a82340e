"""Which task is drawn next, where `data.curriculum` weighs them. Pure: no clock, no I/O, no threads, no chance beyond the seed.

Time is counted in epochs. In a pool a task of weight w is visited w times per epoch, once at a random place in each interval of 1 / w
epochs. A task without results weighs 1, the most there is: so the first epoch visits every task once, in the order of `data.shuffle`,
and where all weigh the same, so does every other epoch. Pools (sources with weights) take turns by stride: each has its share of any
stretch of draws, to within a few groups.

A result changes only when the task's next visit is due. Nothing is drawn by lot, so that frequencies follow the weights exactly, and
draws are a function of the seed and of the order of draws and results.

Source: stride scheduling, Waldspurger and Weihl 1995. Weights by the variance of success: Foster et al. 2025, arXiv:2502.12272;
Bae et al. 2025, arXiv:2504.03380.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.config.curriculum import CurriculumConfig
from agentrl.data.sources import check_source_weights
from agentrl.errors import CheckpointError


def learning_weight(rate: float, target: float) -> float:
    """Return the weight of a pass rate in 0..1: 1 at `target`, 0 at both ends; 4 p (1 - p) for a target of 0.5."""
    return (rate / target) ** (2 * target) * ((1 - rate) / (1 - target)) ** (2 * (1 - target))


@dataclass(slots=True)
class _Pool:
    """Tasks that share a part of the draws: `rows` i64[N] of the dataset, `due` f64[N] in epochs: when each is visited next.

    stride: draws from one turn to the next; turn: in draws, when the next one is due.
    """

    name: str
    rows: NDArray[np.int64]
    due: NDArray[np.float64]
    stride: float
    turn: float
    now: float = 0.0  # epochs: when its last visit was due


@dataclass(slots=True)
class _Step:
    """What metrics tell of a step: groups drawn by source, attempts whose accuracy counted."""

    drawn: Counter[str] = field(default_factory=Counter)
    num_attempts: int = 0


class Curriculum:
    """Draws tasks of a dataset that is not shuffled; visit v of row r is its position v * num_tasks + r, and its group's id."""

    def __init__(self, sources: Sequence[str], config: CurriculumConfig, *, seed: int, shuffle: bool) -> None:
        """Start before the first draw. `sources`: data source of each row of the dataset.

        Raises:
            DataError: the weights name a source that the rows lack, or lack one.
        """
        if config.source_weights:
            check_source_weights(config.source_weights, sources)
        self._config, self._seed, self._shuffle = config, seed, shuffle
        num_tasks = len(sources)
        order = np.random.default_rng([seed, 0]).permutation(num_tasks) if shuffle else np.arange(num_tasks)
        self._first_phase = np.empty(num_tasks, np.float64)  # within an epoch
        self._first_phase[order] = (np.arange(num_tasks) + 0.5) / num_tasks
        self._names = list(dict.fromkeys(sources))
        codes = {name: code for code, name in enumerate(self._names)}
        self._source = np.array([codes[name] for name in sources], np.int32)
        self._pools = self._make_pools()
        self._pool_of = np.empty(num_tasks, np.int32)
        self._place = np.empty(num_tasks, np.int64)
        for index, pool in enumerate(self._pools):
            self._pool_of[pool.rows] = index
            self._place[pool.rows] = np.arange(len(pool.rows))
        self._visits = np.zeros(num_tasks, np.int64)
        self._last = np.zeros(num_tasks, np.float64)  # epochs: when the last visit was
        self._passed = np.zeros(num_tasks, np.float64)  # decayed sums over attempts: of accuracies, of ones
        self._tried = np.zeros(num_tasks, np.float64)
        self._weight = np.ones(num_tasks, np.float64)
        self._step, self._last_step = _Step(), _Step()

    def _make_pools(self) -> list[_Pool]:
        weights = self._config.source_weights
        if not weights:
            return [_Pool("", np.arange(len(self._source)), self._first_phase.copy(), 1.0, 0.5)]
        total = sum(weights.values())
        pools = []
        for code, name in enumerate(self._names):
            rows, stride = np.flatnonzero(self._source == code), total / weights[name]
            pools.append(_Pool(name, rows, self._first_phase[rows], stride, stride / 2))
        return pools

    @property
    def num_tasks(self) -> int:
        return len(self._visits)

    @property
    def uses_results(self) -> bool:
        return self._config.by_pass_rate

    # ------------------------------------------------------------------------------------------------ draws, results

    def draw(self) -> int:
        """Return the position of the task whose turn it is."""
        pool = min(self._pools, key=lambda pool: pool.turn)
        pool.turn += pool.stride
        place = int(pool.due.argmin())
        row = int(pool.rows[place])
        position = int(self._visits[row]) * self.num_tasks + row
        # A result that came late may make a visit due in the past: the time lost is not made up for.
        pool.now = max(pool.now, float(pool.due[place]))
        self._last[row] = pool.now
        self._visits[row] += 1
        pool.due[place] = self._next_due(row)
        self._step.drawn[self._names[self._source[row]]] += 1
        return position

    def observe(self, position: int, accuracies: Sequence[float]) -> None:
        """Count the attempts of a complete group; accuracies in 0..1, none of them: nothing is known."""
        if not accuracies or not self.uses_results:
            return
        row = position % self.num_tasks
        self._passed[row] = self._config.pass_rate_decay * self._passed[row] + math.fsum(accuracies)  # in whatever order they came
        self._tried[row] = self._config.pass_rate_decay * self._tried[row] + len(accuracies)
        self._weight[row] = self._weigh(row)
        self._pools[self._pool_of[row]].due[self._place[row]] = self._next_due(row)
        self._step.num_attempts += len(accuracies)

    def finish_step(self) -> None:
        """Begin to count draws and attempts for the metrics of another step."""
        self._last_step, self._step = self._step, _Step()

    def _next_due(self, row: int) -> float:
        visit = int(self._visits[row])
        return float(self._last[row]) + (1 + (self._phase(row, visit) - self._phase(row, visit - 1))) / float(self._weight[row])

    def _phase(self, row: int, visit: int) -> float:
        """Return where in its interval a visit is, 0..1."""
        if visit == 0 or not self._shuffle:
            return float(self._first_phase[row])
        digest = hashlib.blake2b(f"{self._seed} {row} {visit}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / 2**53

    def _weigh(self, row: int) -> float:
        rate = min(1.0, float(self._passed[row] / self._tried[row]))  # decayed sums of ones may differ by their rounding
        return max(self._config.floor, learning_weight(rate, self._config.target_pass_rate))

    # ------------------------------------------------------------------------------------------------------ account

    def metrics(self) -> dict[str, float]:
        """Return what it draws: of the last step the share of each source, and of the tasks how many count and how they pass.

        effective_tasks: the exponential of the entropy of the next draw. visited: share of the tasks with a draw. pass_rate of a source:
        mean of its tasks with results; never_passed, always_passed: shares of all those tasks. num_attempts: counted in the last step.
        """
        drawn = self._last_step.drawn
        chances = self._chances()
        values = {
            "effective_tasks": float(np.exp(-np.sum(chances * np.log(chances)))),
            "visited": float(np.mean(self._visits > 0)),
            **{f"share/{name}": drawn[name] / drawn.total() for name in self._names if drawn},
        }
        return values | self._pass_rates() if self.uses_results else values

    def _chances(self) -> NDArray[np.float64]:
        """Return f64[num_tasks], the share of draws that each task has by its weight."""
        chances = self._weight.copy()
        rate = sum(1 / pool.stride for pool in self._pools)
        for pool in self._pools:
            chances[pool.rows] /= chances[pool.rows].sum() * pool.stride * rate
        return chances

    def _pass_rates(self) -> dict[str, float]:
        known = self._tried > 0
        rates = self._passed[known] / self._tried[known]
        sources = self._source[known]
        values = {f"pass_rate/{name}": float(rates[sources == code].mean()) for code, name in enumerate(self._names) if code in sources}
        values["num_attempts"] = float(self._last_step.num_attempts)
        if len(rates):
            values |= {"never_passed": float(np.mean(rates == 0)), "always_passed": float(np.mean(rates == 1))}
        return values

    # --------------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, Any]:
        """Return all that draws depend on as JSON values, one list per column of the visited tasks."""
        rows = np.flatnonzero(self._visits)
        due = [float(self._pools[self._pool_of[row]].due[self._place[row]]) for row in rows]
        columns = {"visits": self._visits, "last": self._last, "passed": self._passed, "tried": self._tried}
        return {
            "num_tasks": self.num_tasks,
            "pools": {pool.name: {"turn": pool.turn, "now": pool.now} for pool in self._pools},
            "tasks": {"row": rows.tolist(), "due": due, **{name: column[rows].tolist() for name, column in columns.items()}},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `state` describes; weights, target and floor may have changed meanwhile, tasks and pools may not.

        Raises:
            CheckpointError: it is of another number of tasks or of other pools.
        """
        pools = {pool.name: pool for pool in self._pools}
        if state["num_tasks"] != self.num_tasks or set(state["pools"]) != set(pools):
            raise CheckpointError(
                f"the checkpoint's curriculum is of {_described(state['num_tasks'], state['pools'])}, this run's of "
                f"{_described(self.num_tasks, pools)}; resume with the same data and sources, or begin a run from the checkpoint's policy"
            )
        for name, kept in state["pools"].items():
            pools[name].turn, pools[name].now = kept["turn"], kept["now"]
        tasks = state["tasks"]
        rows = np.array(tasks["row"], np.int64)
        for column, values in ((self._visits, "visits"), (self._last, "last"), (self._passed, "passed"), (self._tried, "tried")):
            column[rows] = tasks[values]
        for row, due in zip(tasks["row"], tasks["due"], strict=True):
            self._pools[self._pool_of[row]].due[self._place[row]] = due
            if self.uses_results and self._tried[row]:
                self._weight[row] = self._weigh(row)


def restore_curriculum(curriculum: Curriculum | None, state: Mapping[str, Any] | None) -> None:
    """Restore what a checkpoint holds of a curriculum, None where it holds nothing.

    Raises:
        CheckpointError: one was added or taken away: ids of groups mean other tasks with a curriculum than without.
    """
    if (state is None) != (curriculum is None):
        was, cure = ("without", "switch it off") if state is None else ("with", "give it again")
        raise CheckpointError(f"the checkpoint was written {was} data.curriculum; {cure}, or begin a run from the checkpoint's policy")
    if curriculum is not None and state is not None:
        curriculum.restore(state)


def _described(num_tasks: int, pools: Mapping[str, Any]) -> str:
    names = ", ".join(sorted(pools))
    return f"{num_tasks} tasks in {f'sources {names}' if names else 'one pool'}"
