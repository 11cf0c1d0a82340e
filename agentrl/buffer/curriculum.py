"""The curriculum: chooses the next task if `data.curriculum` weights tasks. Deterministic: no clock, no I/O,
no threads.

Time is measured in epochs. Within a pool, a task of weight w is visited w times per epoch, once at a
pseudo-random point in each interval of 1 / w epochs. A task without results has weight 1, the maximum. So the
first epoch visits every task once, in the order of `data.shuffle`, and so does every later epoch if all
weights are equal. Pools (sources with weights) are interleaved by stride scheduling: in any window of draws,
each pool has its share to within a few groups.

A result only changes the time of the task's next visit. Tasks are not sampled at random, so the visit
frequencies follow the weights exactly. The draws are a function of the seed and of the order of draws and
results.

Source: stride scheduling, Waldspurger and Weihl 1995. Weights by the variance of success: Foster et al. 2025,
arXiv:2502.12272; Bae et al. 2025, arXiv:2504.03380.
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
from agentrl.data.dataset import check_source_weights
from agentrl.errors import CheckpointError


def learning_weight(rate: float, target: float) -> float:
    """Return the weight of a pass rate p in 0..1: 1 at p = `target`, 0 at p = 0 and p = 1.

    With t = `target` it is (p / t)^(2 t) * ((1 - p) / (1 - t))^(2 (1 - t)), which is 4 p (1 - p) for t = 0.5.
    """
    return (rate / target) ** (2 * target) * ((1 - rate) / (1 - target)) ** (2 * (1 - target))


@dataclass(slots=True)
class _Pool:
    """Tasks that share one part of the draws.

    rows: i64[N], dataset rows.
    due: f64[N], time of each row's next visit in epochs.
    stride: number of draws between two turns of the pool.
    turn: time of the pool's next turn, in draws.
    """

    name: str
    rows: NDArray[np.int64]
    due: NDArray[np.float64]
    stride: float
    turn: float
    now: float = 0.0  # the pool's current time in epochs: when its last visit was due


@dataclass(slots=True)
class _Step:
    """Counts of one step for metrics: groups drawn by source, and attempts with an accuracy."""

    drawn: Counter[str] = field(default_factory=Counter)
    num_attempts: int = 0


class Curriculum:
    """Draws tasks from an unshuffled dataset.

    Visit v of row r has position v * num_tasks + r, which is the group's id.
    """

    def __init__(self, sources: Sequence[str], config: CurriculumConfig, *, seed: int, shuffle: bool) -> None:
        """Start before the first draw. `sources`: data source of each dataset row.

        Raises:
            DataError: the weights name a source that no row has, or a source has no weight.
        """
        if config.source_weights:
            check_source_weights(config.source_weights, sources)
        self._config, self._seed, self._shuffle = config, seed, shuffle
        num_tasks = len(sources)
        order = np.random.default_rng([seed, 0]).permutation(num_tasks) if shuffle else np.arange(num_tasks)
        self._first_phase = np.empty(num_tasks, np.float64)  # time of the first visit, in 0..1 epochs
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
        self._last = np.zeros(num_tasks, np.float64)  # time of the last visit, in epochs
        self._passed = np.zeros(num_tasks, np.float64)  # decayed sum of accuracies
        self._tried = np.zeros(num_tasks, np.float64)  # decayed number of attempts
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

    # ----------------------------------------------------------------------------------------- draws, results

    def draw(self) -> int:
        """Return the position of the next task: the earliest due row of the pool whose turn it is."""
        pool = min(self._pools, key=lambda pool: pool.turn)
        pool.turn += pool.stride
        place = int(pool.due.argmin())
        row = int(pool.rows[place])
        position = int(self._visits[row]) * self.num_tasks + row
        # A late result can make a visit due in the past. Time never runs backward: the lost time is not made
        # up.
        pool.now = max(pool.now, float(pool.due[place]))
        self._last[row] = pool.now
        self._visits[row] += 1
        pool.due[place] = self._next_due(row)
        self._step.drawn.update([self._names[self._source[row]]])
        return position

    def observe(self, position: int, accuracies: Sequence[float]) -> None:
        """Update the pass rate with the attempts of a complete group.

        `accuracies` are in 0..1; if empty, nothing changes.
        """
        if not accuracies or not self.uses_results:
            return
        row = position % self.num_tasks
        self._passed[row] = self._config.pass_rate_decay * self._passed[row] + math.fsum(
            accuracies
        )  # fsum: independent of the order
        self._tried[row] = self._config.pass_rate_decay * self._tried[row] + len(accuracies)
        self._weight[row] = self._weigh(row)
        self._pools[self._pool_of[row]].due[self._place[row]] = self._next_due(row)
        self._step.num_attempts += len(accuracies)

    def finish_step(self) -> None:
        """Close the metrics of this step and start counting for the next one."""
        self._last_step, self._step = self._step, _Step()

    def _next_due(self, row: int) -> float:
        # Visit v falls into interval v at phase(v), and an interval is 1 / weight epochs long. So the gap
        # between visits v - 1 and v is (1 + phase(v) - phase(v - 1)) / weight.
        visit = int(self._visits[row])
        return float(self._last[row]) + (1 + (self._phase(row, visit) - self._phase(row, visit - 1))) / float(
            self._weight[row]
        )

    def _phase(self, row: int, visit: int) -> float:
        """Return the point of a visit within its interval, in 0..1."""
        if visit == 0 or not self._shuffle:
            return float(self._first_phase[row])
        digest = hashlib.blake2b(f"{self._seed} {row} {visit}".encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) / 2**53

    def _weigh(self, row: int) -> float:
        rate = float(self._passed[row] / self._tried[row])
        return max(self._config.floor, learning_weight(rate, self._config.target_pass_rate))

    # ------------------------------------------------------------------------------------------------ account

    def metrics(self) -> dict[str, float]:
        """Return the curriculum's metrics.

        effective_tasks: exponential of the entropy of the next draw.
        visited: share of tasks that were drawn at least once.
        share/<source>: share of the last step's draws.
        pass_rate/<source>: mean pass rate of the source's tasks with results.
        never_passed, always_passed: shares of the tasks with results.
        num_attempts: attempts counted in the last step.
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
        """Return each task's share of draws according to its weight, f64[num_tasks]."""
        chances = self._weight.copy()
        for pool in self._pools:
            chances[pool.rows] /= chances[pool.rows].sum() * pool.stride
        return chances

    def _pass_rates(self) -> dict[str, float]:
        known = self._tried > 0
        rates = self._passed[known] / self._tried[known]
        sources = self._source[known]
        values = {
            f"pass_rate/{name}": float(rates[sources == code].mean())
            for code, name in enumerate(self._names)
            if code in sources
        }
        values["num_attempts"] = float(self._last_step.num_attempts)
        if len(rates):
            values |= {
                "never_passed": float(np.mean(rates == 0)),
                "always_passed": float(np.mean(rates == 1)),
            }
        return values

    # --------------------------------------------------------------------------------------------- checkpoint

    def state(self) -> dict[str, Any]:
        """Return everything that draws depend on, as JSON values with one list per column of the visited
        tasks.
        """
        rows = np.flatnonzero(self._visits)
        due = [float(self._pools[self._pool_of[row]].due[self._place[row]]) for row in rows]
        columns = {"visits": self._visits, "last": self._last, "passed": self._passed, "tried": self._tried}
        return {
            "num_tasks": self.num_tasks,
            "pools": {pool.name: {"turn": pool.turn, "now": pool.now} for pool in self._pools},
            "tasks": {
                "row": rows.tolist(),
                "due": due,
                **{name: column[rows].tolist() for name, column in columns.items()},
            },
        }

    def snapshot(self) -> dict[str, Any]:
        """Return the state with the counts of this step and the last one, which only metrics depend on."""
        steps = [[dict(step.drawn), step.num_attempts] for step in (self._step, self._last_step)]
        return self.state() | {"steps": steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. Weights, target and floor may differ from when it was saved; tasks and pools
        may not.

        Raises:
            CheckpointError: the number of tasks or the pools differ.
        """
        pools = {pool.name: pool for pool in self._pools}
        if state["num_tasks"] != self.num_tasks or set(state["pools"]) != set(pools):
            raise CheckpointError(
                "the checkpoint's curriculum is for "
                f"{_described(state['num_tasks'], state['pools'])}, this run's of "
                f"{_described(self.num_tasks, pools)}; resume with the same data and sources, or "
                "start a new run from the checkpoint's policy"
            )
        for name, kept in state["pools"].items():
            pools[name].turn, pools[name].now = kept["turn"], kept["now"]
        tasks = state["tasks"]
        rows = np.array(tasks["row"], np.int64)
        for column, values in (
            (self._visits, "visits"),
            (self._last, "last"),
            (self._passed, "passed"),
            (self._tried, "tried"),
        ):
            column[rows] = tasks[values]
        for row, due in zip(tasks["row"], tasks["due"], strict=True):
            self._pools[self._pool_of[row]].due[self._place[row]] = due
            if self.uses_results and self._tried[row]:
                self._weight[row] = self._weigh(row)
        if "steps" in state:
            self._step, self._last_step = (_Step(Counter(drawn), tried) for drawn, tried in state["steps"])


def restore_curriculum(curriculum: Curriculum | None, state: Mapping[str, Any] | None) -> None:
    """Restore the curriculum from a checkpoint; `state` is None if the checkpoint has no curriculum.

    Raises:
        CheckpointError: a curriculum was added or removed: group ids mean different tasks with and without
            one.
    """
    if curriculum is None and state is None:
        return
    if curriculum is None or state is None:
        was, cure = ("without", "switch it off") if state is None else ("with", "set it again")
        raise CheckpointError(
            f"the checkpoint was written {was} data.curriculum; {cure}, or start a new run from the "
            "checkpoint's policy"
        )
    curriculum.restore(state)


def _described(num_tasks: int, pools: Mapping[str, Any]) -> str:
    names = ", ".join(sorted(pools))
    return f"{num_tasks} tasks in {f'sources {names}' if names else 'one pool'}"
