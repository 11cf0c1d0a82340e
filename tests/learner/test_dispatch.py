"""Marks of a worker's methods: what they refuse, how lists are cut, how results are joined."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cluster.workers import LocalWorker
from agentrl.learner.dispatch import Dispatch, cut, dispatch, dispatch_of, join_results, threads_of


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sp",), r"unknown split 'sp'; available: dp, all, rank0"),
        (("all", "median"), r"unknown join 'median'; available: first, concat, sum, mean, max, remote"),
        (("rank0", "sum"), r"rank0.*only one result; use join='first'"),
        (("all", "remote"), r"only if the input was split by data.*use split='dp'"),
    ],
)
def test_what_does_not_go_together_is_refused_where_it_is_written(arguments, message):
    with pytest.raises(TypeError, match=message):
        dispatch(*arguments)


def test_a_method_that_cannot_be_spread_is_refused_where_it_is_written():
    def no_items(self, *, folder): ...

    async def waits(self, items): ...

    with pytest.raises(TypeError, match="no_items has no positional parameter whose items could be split"):
        dispatch("dp")(no_items)
    with pytest.raises(TypeError, match="waits is async"):
        dispatch("dp")(waits)
    with pytest.raises(TypeError, match="no_items is not marked by @dispatch"):
        dispatch_of(no_items)


def test_a_marked_method_is_what_it_was():
    class Worker:
        @dispatch("all", thread="disk")
        def write(self, text):
            return text.upper()

        @dispatch("all", thread="disk")
        def read(self): ...

        def helper(self): ...

    assert Worker().write("a") == "A"
    assert dispatch_of(Worker.write) == Dispatch("all", "first", "disk")
    assert threads_of(Worker) == ["disk"]


@given(st.lists(st.integers()), st.integers(1, 5))
def test_parts_are_equal_and_in_order_or_refused(items, num_parts):
    if len(items) % num_parts:
        with pytest.raises(
            ValueError, match=f"score: {len(items)} items cannot be split into equal parts for {num_parts}"
        ):
            cut(items, num_parts, what="score")
        return
    parts = cut(items, num_parts, what="score")
    assert [len(part) for part in parts] == [len(items) // num_parts] * num_parts
    assert join_results(parts, "concat") == items


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3)), min_size=1, max_size=5))
def test_numbers_are_joined_also_key_by_key(pairs):
    for join, expected in [("sum", sum), ("max", max), ("mean", lambda numbers: sum(numbers) / len(numbers))]:
        joined = join_results([{"a": a, "b": b} for a, b in pairs], join)
        assert joined == {"a": expected([a for a, _ in pairs]), "b": expected([b for _, b in pairs])}
    assert join_results(pairs, "first") == pairs[0]


def test_a_local_worker_calls_the_method_of_its_own_class_and_closes_it():
    class Worker:
        closed = False

        @dispatch("dp", join="sum")
        def total(self, items, *, factor=1):
            return factor * sum(items)

        def close(self):
            self.closed = True

    class Negative(Worker):
        def total(self, items, *, factor=1):
            return -super().total(items, factor=factor)

    workers = LocalWorker(Negative(), close=Negative.close)
    handle = workers.begin(Worker.total, [1, 2], factor=2)
    assert (handle.wait(), handle.wait()) == (-6, -6)
    assert workers.patient(3).run(Worker.total, [1]) == -1
    with pytest.raises(TypeError, match="close is not marked"):
        workers.run(Worker.close)
    address, port = workers.find_address()
    assert (address, 0 < port < 65536) == ("127.0.0.1", True)
    workers.stop()
    assert workers.worker.closed
