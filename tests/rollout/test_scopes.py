"""The tree of live scopes: what it shows is what is open, also in an actor whose event loop is blocked by a
plugin.
"""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ToolError
from agentrl.plugins import Tool, ToolResult
from agentrl.rollout.scopes import GENERATE, LiveScope, Scope, count_tasks, look, stack_of


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def names(scope: LiveScope) -> dict:
    return {inner.name: names(inner) for inner in scope.inner}


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=40))
def test_the_tree_shows_what_is_open(steps):
    """Against a model of nested dictionaries: open a scope within any open one, or close any together with
    all within it.
    """
    clock = Clock()
    root = Scope(clock=clock)
    model: dict = {}
    open_ones: list[tuple[Scope, dict, dict, float]] = [
        (root, model, {}, 0.0)
    ]  # scope, its dictionary, the one it stands in, since when

    def close(scope: Scope, own: dict, outer: dict) -> None:
        for inner in [one for one in open_ones if one[2] is own]:
            close(*inner[:3])
        open_ones[:] = [one for one in open_ones if one[0] is not scope]
        scope.__exit__()
        del outer[scope.name]

    for number, (which, is_opening) in enumerate(steps):
        clock.now += 1.0
        scope, own, outer, _ = open_ones[which % len(open_ones)]
        if is_opening:
            inner = scope.open(str(number)).__enter__()
            own[inner.name] = {}
            open_ones.append((inner, own[inner.name], own, clock.now))
        elif scope is not root:
            close(scope, own, outer)
    seen = look(root, limit=1000, places={})
    assert {scope.name: names(scope) for scope in seen.oldest} == model
    ages = {scope.name: scope.age_s for scope in seen.oldest}
    assert ages == {
        scope.name: clock.now - since for scope, _, outer, since in open_ones[1:] if outer is model
    }
    assert list(ages.values()) == sorted(ages.values(), reverse=True)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["reward", "tool search", GENERATE]), max_size=12), st.integers(0, 12))
def test_those_left_out_are_counted(waits, limit):
    root = Scope()
    for number, wait in enumerate(waits):
        root.open(f"group {number}", doing="its agent loop").__enter__().open(wait).__enter__()
    seen = look(root, limit=limit, places={})
    assert len(seen.oldest) + sum(seen.rest.values()) == len(waits)
    shown = " ".join(seen.rest)
    assert all(wait.split()[0] in shown for wait in waits[limit:])
    assert len(list(seen.lines())) >= min(limit, len(waits))


def test_a_scope_closes_when_its_block_raises():
    root = Scope()
    with pytest.raises(ValueError, match="inside"), root.open("outer"), root.open("inner"):
        raise ValueError("inside")
    assert look(root, limit=9, places={}).oldest == ()


def test_an_attempt_is_named_with_what_it_waits_for():
    clock = Clock()
    root, attempt = Scope(clock=clock), Scope()
    with attempt.attach(root, "group 7 member 1 (tool_agent)", doing="its agent loop", key="abc"):
        clock.now = 2.0
        assert list(look(root, limit=1, places={}).lines()) == [
            "group 7 member 1 (tool_agent), 2.0 s: its agent loop"
        ]
        with attempt.open(GENERATE):
            clock.now = 5.0
            assert list(look(root, limit=1, places={"abc": "http://here"}).lines()) == [
                "group 7 member 1 (tool_agent), 5.0 s",
                "  generate at http://here, 3.0 s",
            ]
            assert "generate: not sent to a server" in "\n".join(look(root, limit=1, places={}).lines())
    assert list(look(root, limit=1, places={}).lines()) == ["no attempt in progress"]


def test_tasks_of_one_name_are_counted_together():
    async def main() -> list[tuple[int, str, int]]:
        async def sleeper() -> None:
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(sleeper)
            await trio.testing.wait_all_tasks_blocked()
            found = [
                (task.depth, task.name, task.count) for task in count_tasks(trio.lowlevel.current_task())
            ]
            nursery.cancel_scope.cancel()
        return found

    own, sleepers = trio.run(main)
    assert sleepers == (1, "main.sleeper", 300)
    assert own[0] == 0


def test_the_stack_of_a_thread_says_where_it_stands():
    gate = threading.Event()

    def stand_here() -> None:
        gate.wait(20)

    thread = threading.Thread(target=stand_here)
    thread.start()
    deadline = time.monotonic() + 20
    while not any(frame.endswith("stand_here") for frame in stack_of(thread)):
        assert time.monotonic() < deadline
    innermost, *others = stack_of(thread)
    assert "wait" in innermost or "acquire" in innermost
    assert [frame.rpartition(" ")[2] for frame in others] == ["stand_here"], (
        "of libraries only the innermost function is told"
    )
    gate.set()
    thread.join(20)
    assert stack_of(thread) == []


class Stuck(Tool):
    """Waits until the test lets it go."""

    name = "stuck"
    description = "waits"
    parameters: ClassVar = {"type": "object", "properties": {}}
    runtime = "trio"

    gate: trio.Event

    async def call(self, arguments) -> ToolResult:
        await Stuck.gate.wait()
        raise ToolError("let go")


def test_a_manager_names_group_member_and_tool(stage):
    """The real stack around a scripted model whose second attempt calls a tool that never answers."""

    def script(turn: int, prompt: str) -> str:
        return stage.call("stuck", "{}")

    world = stage.World(script, agent={"tools": ("stuck",)}, plugins=(Stuck,))

    async def main(manager):
        Stuck.gate = trio.Event()
        seen = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(manager.play, world.leases([stage.task()], 2), world.rollout)
            while not seen or "tool stuck" not in "\n".join(seen):
                await trio.testing.wait_all_tasks_blocked()
                await trio.sleep(1)
                seen = list(look(manager.scopes, limit=9, places={}).lines())
            nursery.cancel_scope.cancel()
        return seen, list(look(manager.scopes, limit=9, places={}).lines())

    seen, after = world.run(main)
    named = [line.partition(",")[0] for line in seen]
    assert sorted(named[::2]) == [f"validation row 0 member {member} (tool_agent)" for member in range(2)]
    assert named[1::2] == ["  tool stuck"] * 2
    assert after == ["no attempt in progress"]
