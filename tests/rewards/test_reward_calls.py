"""Where rewards run, what they may return, what is told of a failure; and which terms a task has."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import sys
import threading
from decimal import Decimal

import numpy as np
import pytest
import torch
import trio
import trio.testing

from agentrl.config.reward import REWARD_PRESETS, RewardConfig
from agentrl.errors import ConfigError, DataError, LearnerError, PluginError, RewardError
from agentrl.plugins import BatchReward, GroupReward, Reward, RewardResult, TurnReward, load_plugins
from agentrl.rewards import custom
from agentrl.rewards.calls import RewardCalls, Term
from agentrl.rewards.recipes import Recipe, recipe_of_class
from agentrl.rewards.reward_model import RewardModel
from agentrl.rewards.select import RewardTable, without_rewards
from parts.trajectories import attempted, make_task

GOOD = RewardResult(1.0)
DONE = attempted(make_task("How many?", "72"), "1", "2")


class Host:
    """Runs asyncio code by asyncio."""

    async def run(self, function, *args):
        return await trio.to_thread.run_sync(lambda: asyncio.run(function(*args)))


def term_of(base: type, function, *, runs_in: str = "inline", timeout_s: float = 100.0, **fields) -> Term:
    """A reward of the kind `base` whose `score` is `function`."""
    kind = type(
        "Mine", (base,), {"name": "mine", "runs_in": runs_in, "score": staticmethod(function), **fields}
    )
    return Term("shown", kind(), 1.0, timeout_s, None)


def called(*calls, host=None, clock=None):
    """What comes of calls of (term, subject)."""

    async def main():
        rewards = RewardCalls(host or Host(), num_processes=1)
        return await rewards.call_all(calls)

    return trio.run(main, clock=clock)


def returned(base: type, result: object, subject: object = DONE):
    return called((term_of(base, lambda subject: result), subject))


TURNS = [
    ([1.0, None], True),
    ((0, np.float32(2)), True),
    ([None, None], True),
    ([1.0], False),
    ([1.0, 1.0, 1.0], False),
    ([1.0, math.nan], False),
    ([math.inf, 1.0], False),
    ([1.0, "1"], False),
    ("12", False),
    (1.0, False),
    (None, False),
    ({0: 1.0, 1: 1.0}, False),
]
RESULTS = [
    (GOOD, True),
    (None, True),
    (RewardResult(1, {"a": 1, "b": True}, {"c": None}), True),
    (RewardResult(math.nan), False),
    (RewardResult(1.0, {"a": math.inf}), False),
    (RewardResult(1.0, {"a": 1.0, "b": "1"}), False),
    (1.0, False),
    ([GOOD], False),
    ("", False),
]


@pytest.mark.parametrize(("result", "is_right"), TURNS)
def test_a_turn_reward_has_a_number_for_each_turn(result, is_right):
    if is_right:
        assert returned(TurnReward, result) == [result]
    else:
        with pytest.raises(
            RewardError, match=r"'shown' returned .*one finite number or None for each of the 2"
        ):
            returned(TurnReward, result)


@pytest.mark.parametrize(("result", "is_right"), RESULTS)
def test_a_reward_is_finite_or_does_not_apply(result, is_right):
    if is_right:
        assert returned(Reward, result) == [result]
        assert returned(GroupReward, [result, GOOD], [DONE, DONE]) == [[result, GOOD]]
        assert returned(BatchReward, (GOOD, result), [DONE, DONE]) == [(GOOD, result)]
    else:
        with pytest.raises(
            RewardError, match=r"'shown' returned .*return a RewardResult of finite numbers, or"
        ):
            returned(Reward, result)
        for wrong in ([result, GOOD], [GOOD, result]):
            with pytest.raises(RewardError, match="for each of the 2 attempts"):
                returned(GroupReward, wrong, [DONE, DONE])


@pytest.mark.parametrize("result", [[GOOD], [GOOD] * 3, [], "ab", None, GOOD, iter([GOOD, GOOD])])
def test_a_group_has_a_result_for_each_attempt(result):
    with pytest.raises(RewardError, match="for each of the 2 attempts"):
        returned(GroupReward, result, [DONE, DONE])


@pytest.mark.parametrize("runs_in", ["inline", "thread", "asyncio", "trio"])
def test_each_reward_runs_where_it_says(runs_in):
    def where() -> str:
        if threading.current_thread() is not threading.main_thread():
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return "thread"
            return "asyncio"
        return "trio" if trio.lowlevel.in_trio_task() else "inline"

    seen = []

    def score(attempt):
        seen.append((where(), attempt))
        return GOOD

    async def score_async(attempt):
        return score(attempt)

    function = score_async if runs_in in ("asyncio", "trio") else score
    assert called((term_of(Reward, function, runs_in=runs_in), DONE)) == [GOOD]
    assert seen == [("trio" if runs_in == "inline" else runs_in, DONE)]


async def never(attempt):
    await trio.sleep(math.inf)


def test_results_are_in_the_order_of_the_calls_whoever_ends_first():
    def after(seconds: float):
        async def score(attempt):
            await trio.sleep(seconds)
            return RewardResult(seconds)

        return term_of(Reward, score, runs_in="trio"), DONE

    inline = (term_of(Reward, lambda attempt: GOOD), DONE)
    results = called(after(3.0), inline, after(1.0), clock=trio.testing.MockClock(autojump_threshold=0))
    assert [result.value for result in results] == [3.0, 1.0, 1.0]
    assert called() == []
    assert called(inline, inline) == [GOOD, GOOD]


@pytest.mark.parametrize("runs_in", ["inline", "thread", "trio"])
@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (OSError("no disk"), RewardError, r"reward 'shown' raised OSError: no disk$"),
        (SystemExit(3), RewardError, r"reward 'shown' raised PluginQuit"),
        (RewardError("unfair"), RewardError, r"reward 'shown': unfair$"),
        (LearnerError("rank 1 is gone"), LearnerError, r"^rank 1 is gone$"),
    ],
)
def test_a_failure_names_the_reward_and_ends_the_others(runs_in, error, kind, told):
    def score(attempt):
        raise error

    async def score_async(attempt):
        raise error

    failing = term_of(Reward, score_async if runs_in == "trio" else score, runs_in=runs_in)
    with pytest.raises(kind, match=told):
        called((failing, DONE), (term_of(Reward, never, runs_in="trio"), DONE))


def test_a_row_without_a_ground_truth_is_named():
    def score(attempt):
        raise KeyError("truth")

    bare = attempted(make_task("?", None, task_id="t:5"), "1")
    hint = r"KeyError: 'truth'; the row t:5 has no reward_model.ground_truth"
    with pytest.raises(RewardError, match=hint):
        called((term_of(Reward, score), bare))
    with pytest.raises(RewardError, match=hint):
        called((term_of(GroupReward, score), [DONE, bare]))
    with pytest.raises(RewardError, match=r"KeyError: 'truth'$"):
        called((term_of(GroupReward, score), [DONE, DONE]))


def test_code_for_the_other_loop_is_recognized():
    async def of_asyncio(attempt):
        await asyncio.sleep(0.001)

    async def of_trio(attempt):
        await trio.sleep(0.001)

    with pytest.raises(RewardError, match=r'awaits asyncio code.*write `runs_in = "asyncio"` in its class'):
        called((term_of(Reward, of_asyncio, runs_in="trio"), DONE))
    with pytest.raises(RewardError, match=r'awaits trio code.*write `runs_in = "trio"` in its class'):
        called((term_of(Reward, of_trio, runs_in="asyncio"), DONE))


def test_a_deadline_begins_with_the_place():
    """Four calls of 3 s share one place: none needs more than its 4 s, though the last begins after 9."""
    ended = []

    async def score(attempt):
        await trio.sleep(3.0)
        ended.append(trio.current_time())
        return GOOD

    term = term_of(Reward, score, runs_in="trio", timeout_s=4.0, max_concurrent=1)
    clock = trio.testing.MockClock(autojump_threshold=0)
    assert called(*[(term, DONE)] * 4, clock=clock) == [GOOD] * 4
    assert [after - before for before, after in itertools.pairwise(ended)] == [3.0] * 3
    ended.clear()
    unlimited = term_of(Reward, score, runs_in="trio", timeout_s=4.0)
    called(*[(unlimited, DONE)] * 4, clock=trio.testing.MockClock(autojump_threshold=0))
    assert len(set(ended)) == 1


@pytest.mark.parametrize(("max_concurrent", "num_calls", "waited"), [(None, 1, 1), (1, 3, 1), (1, 100, 20)])
def test_what_never_ends_times_out_and_so_does_the_wait_for_it(max_concurrent, num_calls, waited):
    """Who waits for a place does so for 20 deadlines at most."""

    async def main() -> list[float]:
        rewards = RewardCalls(Host(), num_processes=1)
        term = term_of(Reward, never, runs_in="trio", timeout_s=2.0, max_concurrent=max_concurrent)
        start, ends = trio.current_time(), []

        async def one() -> None:
            with pytest.raises(RewardError, match="reward 'shown': timed out after 2 s"):
                await rewards.call(term, DONE)
            ends.append((trio.current_time() - start) / 2.0)

        async with trio.open_nursery() as nursery:
            for _ in range(num_calls):
                nursery.start_soon(one)
        return ends

    ends = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert sorted(ends)[:3] == [1.0, 2.0, 3.0][: min(num_calls, 3)]
    assert max(ends) == max(waited, min(num_calls, 20))


def test_a_thread_that_hangs_is_left_behind():
    release = threading.Event()

    def score(attempt):
        release.wait(60.0)
        return GOOD

    try:
        with pytest.raises(RewardError, match=r"timed out after 0\.05 s"):
            called((term_of(Reward, score, runs_in="thread", timeout_s=0.05), DONE))
    finally:
        release.set()


def test_several_threads_work_at_once():
    barrier = threading.Barrier(3, timeout=60.0)

    def score(attempt):
        barrier.wait()
        return GOOD

    assert called(*[(term_of(Reward, score, runs_in="thread"), DONE)] * 3) == [GOOD] * 3


# ---------------------------------------------------------------------------------------- the user's function


@pytest.mark.parametrize(
    ("returned", "value", "metrics", "details"),
    [
        (1, 1.0, {}, {}),
        (True, 1.0, {}, {}),
        (np.bool_(True), 1.0, {}, {}),
        (np.float32(0.5), 0.5, {}, {}),
        (np.array(0.5), 0.5, {}, {}),
        (torch.tensor(0.5), 0.5, {}, {}),
        (torch.tensor(True), 1.0, {}, {}),
        ({"score": np.array(1), "n": torch.tensor(3)}, 1.0, {"n": 3.0}, {}),
        ({"score": 0.5, "len": 3, "why": "so", "none": None}, 0.5, {"len": 3.0}, {"why": "so", "none": None}),
        ({"score": 1, "acc": 0}, 1.0, {"acc": 0.0, "accuracy": 0.0}, {}),
        ({"score": 1, "acc": 0, "accuracy": 1}, 1.0, {"acc": 0.0, "accuracy": 1.0}, {}),
        ({"score": 1, "nan": math.nan, 3: 4}, 1.0, {"3": 4.0}, {"nan": math.nan}),
    ],
)
def test_what_a_function_returns(returned, value, metrics, details):
    result = custom.result_of(returned)
    assert (result.value, dict(result.metrics), list(result.details)) == (value, metrics, list(details))
    assert type(result.value) is float


def test_what_is_no_result():
    assert custom.result_of(None) is custom.result_of({"score": None, "a": 1}) is None
    for wrong in ({}, {"a": None}, "1", math.inf, {"score": math.nan}, {"score": "1"}, [1.0], 1j):
        with pytest.raises(RewardError, match="return a finite number, a dict"):
            custom.result_of(wrong)


async def forgotten():
    return 1.0


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("1.0", "returned '1.0' of type str; return a finite number"),
        ({"score": "1.0"}, "returned '1.0' of type str as `score`; return"),
        ((1.0, "why"), "returned (1.0, 'why') of type tuple; return"),
        (Decimal("1.5"), "returned Decimal('1.5') of type decimal.Decimal; return"),
        (np.array([0.5]), "returned array([0.5]) of type numpy.ndarray; return"),
        (torch.tensor([0.5]), "returned tensor([0.5000]) of type torch.Tensor; return"),
        (math.nan, "returned nan, which is not finite; return"),
        (10**400, "0..., which is not finite; return"),
        (10**5000, "returned a value, which is not finite; return"),
        ({"score": 10**400}, ", which is not finite as `score`; return"),
        ({"acc": 1.0}, "returned {'acc': 1.0} of type dict; return"),
    ],
    ids=range(11),
)
def test_what_is_wrong_with_a_result_is_named(returned, told):
    with pytest.raises(RewardError, match=re.escape(told)):
        custom.result_of(returned)


def test_a_forgotten_await_is_named():
    with pytest.raises(RewardError, match="returned a coroutine: `await` is missing; return a finite number"):
        custom.result_of(forgotten())


def test_a_process_says_what_a_thread_says(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth): return '1.0'\n")
    told = []
    for runs_in in ("thread", "process"):
        config = RewardConfig.model_validate({"custom_function": {"path": str(file), "runs_in": runs_in}})
        term = RewardTable(config, load_plugins()).own(DONE.task)
        with pytest.raises(RewardError) as raised:
            called((term, DONE))
        told.append(str(raised.value))
    assert told[0] == told[1]
    assert "'custom': the custom reward function returned '1.0' of type str" in told[0]


FUNCTIONS = """
def plain(data_source, solution_str, ground_truth, extra_info, bonus=0):
    return bonus + extra_info["num_turns"]
def without(data_source, solution_str, ground_truth): return len(solution_str)
def every(**given): return {"score": 1, "keys": sorted(given)}
def batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):
    return [bonus + len(s) + info["num_turns"] + (t == "72") + (d == "s") for s, info, t, d in
            zip(solution_strs, extra_infos, ground_truths, data_sources)]
async def later(data_source, solution_str, ground_truth): return 2
async def batch_later(data_sources, solution_strs, **others): return [3 for _ in solution_strs]
def few(data_source): return 1
def more(data_source, solution_str, ground_truth, extra_info, other): return 1
class Mine: pass
number = 3
def yielding(data_source, solution_str, ground_truth): yield 2
built_in = max
"""


@pytest.fixture
def functions(tmp_path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize(
    ("name", "scope", "kwargs", "value"),
    [
        ("plain", "trajectory", {}, 2.0),
        ("plain", "trajectory", {"bonus": 3}, 5.0),
        ("without", "trajectory", {}, 3.0),
        ("every", "trajectory", {"bonus": 3}, 1.0),
        ("later", "trajectory", {}, 2.0),
        ("batch", "batch", {"bonus": 10}, 17.0),
        ("batch_later", "batch", {}, 3.0),
    ],
)
def test_functions_of_every_kind(functions, name, scope, kwargs, value):
    reward = custom.load_function(functions, name, kwargs, scope, "thread")
    assert reward.runs_in == ("asyncio" if "later" in name else "thread")
    assert reward.config == {}
    scored = reward.score([DONE, DONE] if scope == "batch" else DONE)
    if "later" in name:
        scored = asyncio.run(scored)
    results = scored if scope == "batch" else [scored]
    assert [result.value for result in results] == [value] * (2 if scope == "batch" else 1)
    if name == "every":
        keys = ["bonus", "data_source", "extra_info", "ground_truth", "solution_str"]
        assert results[0].details == {"keys": keys}
    if "later" not in name:
        assert custom.load_function(functions, name, kwargs, scope, "process").runs_in == "process"


@pytest.mark.parametrize(
    ("name", "kwargs", "told"),
    [
        (
            "few",
            {},
            r"called as few\(data_source, solution_str, ground_truth, extra_info\), by name: .*it takes",
        ),
        ("more", {}, r"missing a required argument: 'other'"),
        (
            "without",
            {"bonus": 1, "ground_truth": 2},
            r"ground_truth, extra_info, bonus\), by name: .*'bonus'",
        ),
        ("Mine", {}, r"is a class .*; name it in reward.sources"),
        ("yielding", {}, r"'yielding' \(.*\): `yielding` is a generator; return the result instead"),
        ("number", {}, r":number is 3, not a function"),
        ("nothing", {}, r"has no 'nothing'; it has: plain, without, every, batch, later, batch_later, few"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(functions, name, kwargs, told):
    with pytest.raises(PluginError, match=told):
        custom.load_function(functions, name, kwargs, "trajectory", "thread")


def test_an_async_function_runs_in_asyncio_alone(functions):
    with pytest.raises(ConfigError, match="runs_in=process: 'later' is async and runs in asyncio"):
        custom.load_function(functions, "later", {}, "trajectory", "process")


# -------------------------------------------------------------------------------------------------- the table

PLUGINS = """
from agentrl.errors import ConfigError
from agentrl.plugins import GroupReward, Reward, RewardResult

class Fixed(Reward):
    name = "fixed"
    def __init__(self, config=None):
        super().__init__(config)
        if self.config: raise ConfigError("it has no options")
    def score(self, attempt): return RewardResult(1.0)

class Own(Reward):
    name = "own"
    def check(self, task):
        if task.ground_truth == "broken": raise OSError("no disk")
    def score(self, attempt): return RewardResult(self.config.get("value", 1.0))

class Rank(GroupReward):
    name = "rank"
    runs_in = "process"
    def score(self, attempts): return [RewardResult(0.0)] * len(attempts)
"""


@pytest.fixture
def table_of(tmp_path):
    (tmp_path / "rewards.py").write_text(PLUGINS)

    def table_of(**config) -> RewardTable:
        return RewardTable(RewardConfig(**config), load_plugins([str(tmp_path / "rewards.py")]))

    return table_of


def task_of(source: str, truth: object = "72", **fields):
    return make_task("?", truth, data_source=source, **fields)


def names(terms) -> list[str]:
    return [term.name for term in terms]


def test_terms_stand_beside_the_rows_own_reward(table_of):
    table = table_of(
        sources={"s": "own", "t": "fixed"},
        weight=0.5,
        timeout_s=9.0,
        terms={
            "rank": {"weight": 2.0, "timeout_s": 3.0},
            "again": {"reward": "own", "sources": ["s", "x*"], "config": {"value": 4.0}},
        },
        reward_config={"own": {"value": 3.0}},
    )
    own, rank, again = table.terms(task_of("s"))
    assert names([own, rank, again]) == ["own", "rank", "again"]
    assert [(t.weight, t.timeout_s, t.scope) for t in (own, rank, again)] == [
        (0.5, 9.0, "trajectory"),
        (2.0, 3.0, "group"),
        (1.0, 9.0, "trajectory"),
    ]
    assert [t.reward.score(DONE).value for t in (own, again)] == [3.0, 4.0]
    assert own.recipe is again.recipe is None
    assert rank.recipe.make().name == "rank"
    assert names(table.terms(task_of("t"))) == ["fixed", "rank"]
    assert names(table.terms(task_of("s"), "group")) == ["rank"]
    assert names(table.terms(task_of("s"), "trajectory", "turn")) == ["own", "again"]
    assert table.own(task_of("s")) is own is table.terms(task_of("s"))[0]
    assert [table.may_score(scope) for scope in ("trajectory", "turn", "group", "batch")] == [
        True,
        False,
        True,
        False,
    ]
    assert [type(reward).__name__ for reward in table.find(GroupReward)] == ["Rank"]
    assert len(table.find(type(own.reward))) == 2


def test_presets_do_not_count_as_configured(table_of):
    table = table_of()
    assert not table.may_score("trajectory")
    assert table.find(Reward) == []


def test_a_preset_that_is_not_installed_is_missed_by_the_tasks_that_need_it(table_of, monkeypatch):
    monkeypatch.setitem(REWARD_PRESETS, "absent", "absent")
    table = table_of(sources={"s": "own"})
    assert table.own(task_of("s")).name == "own"
    with pytest.raises(PluginError, match="unknown reward 'absent'"):
        table.own(task_of("absent"))


def test_a_reference_to_a_function_is_a_reward(table_of, functions):
    name = f"{functions}:plain"
    table = table_of(
        sources={"s": name},
        terms={"more": {"reward": name, "config": {"bonus": 7}}},
        reward_config={"plain": {"bonus": 5}},
    )
    own, more = table.terms(task_of("s"))
    assert (own.name, own.recipe, own.reward.score(DONE).value) == ("plain", None, 7.0)
    assert (more.name, more.reward.score(DONE).value) == ("more", 9.0)


def test_the_custom_function_goes_before_all_sources(table_of, functions):
    settings = {
        "path": functions,
        "name": "batch",
        "scope": "batch",
        "kwargs": {"bonus": 1},
        "runs_in": "process",
    }
    table = table_of(sources={"s": "own"}, custom_function=settings, weight=0.5, timeout_s=3.0)
    own = table.own(task_of("s"))
    assert (own.name, own.weight, own.timeout_s, own.scope) == ("custom", 0.5, 3.0, "batch")
    assert own is table.own(task_of("unknown"))
    assert table.find(Reward) == []
    assert table.find(BatchReward) == [own.reward]
    assert table.may_score("batch")
    assert not table.may_score("trajectory")
    assert own.recipe.make().score([DONE])[0].value == own.reward.score([DONE])[0].value


@pytest.mark.parametrize(
    ("config", "kind", "told"),
    [
        ({"sources": {"s": "nothing"}}, PluginError, r"reward.sources.s.*unknown reward 'nothing'"),
        ({"terms": {"nothing": {}}}, PluginError, r"reward.terms.nothing.*unknown reward"),
        ({"terms": {"a/b": {"reward": "own"}}}, ConfigError, "a term's name must not contain `/`"),
        *(
            ({"terms": {name: {"reward": "own"}}}, ConfigError, "or be one of agent, interaction, tool")
            for name in ("tool", "interaction", "agent")
        ),
        ({"reward_config": {"FILE:Own": {}}}, PluginError, "write reward.reward_config.own"),
        ({"sources": {"s": "fixed"}, "reward_config": {"fixed": {"x": 1}}}, ConfigError, r"reward.sources.s"),
    ],
)
def test_a_wrong_table_is_refused_at_the_start(table_of, tmp_path, config, kind, told):
    if "reward_config" in config:
        config["reward_config"] = {
            name.replace("FILE", f"{tmp_path}/rewards.py"): value
            for name, value in config["reward_config"].items()
        }
    with pytest.raises(kind, match=told):
        table_of(**config)


def test_every_reward_of_a_task_is_checked(table_of):
    table = table_of(sources={"s": "own", "g": "fixed"}, terms={"other": {"reward": "own", "sources": ["g"]}})
    for source in ("s", "g"):
        table.check(task_of(source))
    with pytest.raises(DataError, match="reward 'own' raised in `check`: OSError: no disk"):
        table.check(task_of("s", "broken"))
    same = table_of(sources={"s": "own", "g": "fixed"}, terms={"own": {}})
    with pytest.raises(ConfigError, match=r"reward.terms.own: the data source 's' already has this reward"):
        same.check(task_of("s"))
    same.check(task_of("g"))
    with pytest.raises(DataError, match=r"task t:9: no reward for data_source 'x'; known: .*arithmetic"):
        same.check(task_of("x", task_id="t:9"))


def test_without_rewards_rows_are_played_and_not_scored():
    plugins = load_plugins()
    table = RewardTable(without_rewards(plugins, ["a", "b"]), plugins)
    for source in ("a", "b"):
        table.check(task_of(source, None))
        own = table.own(task_of(source))
        assert (own.name, own.reward.score(DONE)) == ("unscored", RewardResult(0.0))
        assert own.reward.runs_in == "inline"


def test_the_reward_model_answers_in_a_run_alone(table_of):
    table = table_of(sources={"s": "reward_model"}, timeout_s=3.0)
    own = table.own(task_of("s"))
    assert own.timeout_s == math.inf
    with pytest.raises(RewardError, match="only `agentrl train` has one"):
        own.reward.score([DONE])
    own.reward.connect(lambda attempts: [RewardResult(float(len(attempts)))])
    assert own.reward.score([DONE, DONE]) == [RewardResult(2.0)]
    assert own.reward.config == {}
    with pytest.raises(ConfigError, match="reward 'reward_model'"):
        RewardModel({"x": 1})


class Outer:
    class Inner(Reward):
        name = "inner"

        def score(self, attempt):
            return GOOD


def test_a_recipe_makes_the_reward_by_its_name(tmp_path, monkeypatch):
    recipe = recipe_of_class(Outer.Inner, {"a": 1})
    assert recipe == Recipe(__name__, "Outer.Inner", ({"a": 1},))
    assert recipe.make().config == {"a": 1}
    (tmp_path / "rewards.py").write_text(PLUGINS)
    plugins = load_plugins([str(tmp_path / "rewards.py")])
    mine = plugins.rewards.get("own")
    assert recipe_of_class(mine).source == str(tmp_path / "rewards.py")
    assert recipe_of_class(mine, {"value": 2}).make().config == {"value": 2}
    monkeypatch.setattr(Outer.Inner, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/program.py", raising=False)
    assert recipe_of_class(Outer.Inner).source == "/program.py"

    class Local(Outer.Inner):
        pass

    with pytest.raises(
        PluginError, match="'inner': its class is defined in a function; define it at the top"
    ):
        recipe_of_class(Local)
