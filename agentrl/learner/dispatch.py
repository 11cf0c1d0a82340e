"""Marking of a worker's methods: how arguments are split over its ranks and results joined; no Ray here.

A *worker* is a plain class, instantiated once per rank. Ranks with the same part of the data (sequence or
tensor parallel) are *replicas* of one data-parallel rank.

```python
class Learner:
    @dispatch("dp", join="remote")
    def score(self, microbatches: Sequence[Microbatch]) -> Sequence[ScoredMicrobatch]: ...

    @dispatch("all")
    def load(self, folder: str) -> None: ...
```
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

Split = Literal["dp", "all", "rank0"]
"""How arguments reach the ranks.

dp: every positional list concatenates the items of all data-parallel ranks, equally many each, and is cut
into that many parts.
all: every rank gets the arguments unchanged.
rank0: only rank 0 is called.
"""

Join = Literal["first", "concat", "sum", "mean", "max", "remote"]
"""How results become one. Of replicas, only the first one's result counts.

first: rank 0's result.
concat: the lists of all ranks, concatenated.
sum, mean, max: of numbers, or of dicts of numbers by key.
remote: a sequence whose items stay on the ranks until they are read.
"""

_MARK = "__dispatch__"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How one method is distributed.

    thread: name of a thread that it runs in, concurrently with other methods; None: the common thread.
    """

    split: Split
    join: Join
    thread: str | None = None


def dispatch(split: Split, join: Join = "first", *, thread: str | None = None) -> Callable[[F], F]:
    """Mark a method; a direct call is not affected.

    Args:
        thread: run concurrently with the other methods of its rank, one call at a time, instead of after
            earlier calls.

    Raises:
        TypeError: split or join is unknown, they do not fit together, or the method has nothing to split.
    """
    _check(split, join)

    def mark(method: F) -> F:
        if inspect.iscoroutinefunction(method):
            raise TypeError(f"@dispatch: {method.__qualname__} is async; methods of workers are synchronous")
        if split == "dp" and len(_positional(method)) < 2:
            raise TypeError(
                f"@dispatch('dp'): {method.__qualname__} has no positional parameter whose items could be "
                "split"
            )
        setattr(method, _MARK, Dispatch(split, join, thread))
        return method

    return mark


def dispatch_of(method: Callable[..., Any]) -> Dispatch:
    """Return how a method is distributed.

    Raises:
        TypeError: it is not marked.
    """
    found = getattr(method, _MARK, None)
    if not isinstance(found, Dispatch):
        raise TypeError(
            f"{getattr(method, '__qualname__', method)} is not marked by @dispatch, so a group cannot run it"
        )
    return found


def threads_of(worker: type) -> list[str]:
    """Return the names of all threads, besides the common one, that methods of a worker class use."""
    marks = (getattr(getattr(worker, name), _MARK, None) for name in dir(worker))
    return sorted({mark.thread for mark in marks if isinstance(mark, Dispatch) and mark.thread is not None})


def cut(items: Sequence[Any], num_parts: int, *, what: str) -> list[list[Any]]:
    """Cut `items` into `num_parts` equal parts, in order.

    Raises:
        ValueError: the parts would not be equal. Ranks with fewer items would leave the others waiting in a
            collective.
    """
    size, rest = divmod(len(items), num_parts)
    if rest:
        raise ValueError(
            f"{what}: {len(items)} items cannot be split into equal parts for {num_parts} data-parallel ranks"
        )
    return (
        [list(items[start : start + size]) for start in range(0, size * num_parts, size)]
        if size
        else [[] for _ in range(num_parts)]
    )


def join_results(results: Sequence[Any], join: Join) -> Any:
    """Join the results of the ranks, given in rank order.

    `remote` returns the first result, for a single worker; a group makes `RemoteResults` instead.
    """
    if join == "first" or join == "remote":
        return results[0]
    if join == "concat":
        return [item for result in results for item in result]
    if isinstance(results[0], Mapping):
        return {name: join_results([result[name] for result in results], join) for name in results[0]}
    if join == "max":
        return max(results)
    return sum(results) if join == "sum" else sum(results) / len(results)


def _check(split: str, join: str) -> None:
    if split not in get_args(Split):
        raise TypeError(f"@dispatch: unknown split {split!r}; available: {', '.join(get_args(Split))}")
    if join not in get_args(Join):
        raise TypeError(f"@dispatch: unknown join {join!r}; available: {', '.join(get_args(Join))}")
    if split == "rank0" and join != "first":
        raise TypeError(f"@dispatch('rank0', join={join!r}): there is only one result; use join='first'")
    if join == "remote" and split != "dp":
        raise TypeError(
            f"@dispatch({split!r}, join='remote'): results can stay on their ranks only if the input was "
            "split by data; use split='dp'"
        )


def _positional(method: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return [p for p in inspect.signature(method).parameters.values() if p.kind in kinds]
