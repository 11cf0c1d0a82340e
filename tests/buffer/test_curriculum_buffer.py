"""The curriculum where it is used: what counts as a result, what a checkpoint keeps, which settings are
refused, and when.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.curriculum import Curriculum
from agentrl.buffer.ledger import Ledger, LedgerRules
from agentrl.config.compose import load_config
from agentrl.config.curriculum import CurriculumConfig
from agentrl.config.schema import Config
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.checked_dataset import Playable, check_training_data
from agentrl.data.dataset import Dataset
from agentrl.data.rows import AgentChoice
from agentrl.errors import CheckpointError, ConfigError, DataError
from agentrl.plugins import load_plugins
from agentrl.types import Lease, Outcome, Trajectory
from parts.scripted import tiny_chat
from parts.trajectories import ATTEMPTS, Rows, play, stored

NUM_TASKS = 6


def curriculum(**options) -> Curriculum:
    return Curriculum(["s"] * NUM_TASKS, CurriculumConfig(**options), seed=3, shuffle=True)


def buffer(
    *, has_curriculum: bool = True, drop_constant_groups: bool = False, has_greedy: bool = False, **rules
) -> ReplayBuffer:
    chosen = curriculum(by_pass_rate=True) if has_curriculum else None
    rules = LedgerRules(**{"groups_per_step": 2, "max_staleness": 0, "group_size": 2, **rules})
    target = ReplayBuffer(
        Rows(NUM_TASKS),
        rules,
        ATTEMPTS,
        drop_constant_groups=drop_constant_groups,
        has_greedy=has_greedy,
        curriculum=chosen,
    )
    target.advance(0)
    return target


def attempt(lease: Lease, member: int, accuracy: float | None, **fields) -> Trajectory:
    """Its reward reports `accuracy`; None: nothing."""
    return play(lease, member, metrics={} if accuracy is None else {"accuracy": accuracy}, **fields)


def finish(target: ReplayBuffer, lease: Lease, *accuracies: float) -> None:
    members = [attempt(lease, member, value, reward=value) for member, value in enumerate(accuracies)]
    target.add("a", stored(*members))


# ------------------------------------------------------------------------------------------------ what counts


def test_what_counts_as_accuracy():
    lease = Lease(0, Rows(NUM_TASKS).task(0), 2, 0)
    cases = [
        (attempt(lease, 0, 0.25, reward=-1.0), 0.25),  # unshaped, whatever else was earned
        (attempt(lease, 0, None, reward=0.1), 1.0),
        (attempt(lease, 0, None, reward=0.0), 0.0),
        (attempt(lease, 0, 1.0, outcome=Outcome.TRUNCATED), 1.0),
        (attempt(lease, 0, 1.0, outcome=Outcome.TOOL_ERROR), None),
        (attempt(lease, 0, 1.0, is_greedy=True), None),
        (attempt(lease, 0, 37.0), None),
        (attempt(lease, 0, float("nan")), None),
    ]
    assert [AttemptFacts.of(trajectory).accuracy for trajectory, _ in cases] == [
        accuracy for _, accuracy in cases
    ]


def test_results_count_when_the_group_is_complete_also_where_it_is_dropped_then():
    target = buffer(drop_constant_groups=True)
    [lease, _] = target.lease("a", 2, 0.0)
    target.add("a", stored(*[attempt(lease, 0, 1.0)]))
    target.advance(1)
    assert target.curriculum()["num_attempts"] == 0.0
    target.add("a", stored(*[attempt(lease, 1, 1.0)]))
    assert target.counts().dropped == {"no_variance": 1}
    target.advance(2)
    metrics = target.curriculum()
    assert (metrics["num_attempts"], metrics["pass_rate/s"], metrics["always_passed"]) == (2.0, 1.0, 1.0)
    assert target.curriculum() == metrics, "looking changes nothing"


def test_greedy_late_and_repeated_members_do_not_count():
    target = buffer(group_size=1, has_greedy=True)
    [lease] = target.lease("a", 1, 0.0)
    first, greedy = attempt(lease, 0, 1.0), attempt(lease, 1, 0.0, is_greedy=True)
    target.add("a", stored(*[first, first.replace(metrics={"accuracy": 0.0}), greedy, greedy, first]))
    target.advance(1)
    assert (target.curriculum()["num_attempts"], target.curriculum()["pass_rate/s"]) == (1.0, 1.0)


def test_members_of_a_dead_owner_do_not_count():
    target = buffer()
    [lease] = target.lease("dead", 1, 0.0)
    target.add("dead", stored(*[attempt(lease, 0, 0.0)]))
    target.release("dead")
    [again] = target.lease("a", 1, 0.0)
    assert again.group_id == lease.group_id
    finish(target, again, 1.0, 1.0)
    target.advance(1)
    assert target.curriculum()["pass_rate/s"] == 1.0


def test_without_results_nothing_is_read_and_no_pass_rate_is_told():
    chosen = curriculum(source_weights={"s": 1})
    target = ReplayBuffer(
        Rows(NUM_TASKS),
        LedgerRules(groups_per_step=1, max_staleness=0, group_size=1),
        ATTEMPTS,
        curriculum=chosen,
    )
    target.advance(0)
    [lease] = target.lease("a", 1, 0.0)
    finish(target, lease, 1.0)
    target.advance(1)
    assert target.curriculum() == {
        "effective_tasks": pytest.approx(NUM_TASKS),
        "visited": pytest.approx(1 / 6),
        "share/s": 1.0,
    }


# ------------------------------------------------------------------------------------------------- checkpoint


def run_steps(target: ReplayBuffer, steps: range, rates: list[float]) -> list[int]:
    """Play whole steps, one group at a time; tasks pass at their rates. Returns the ids drawn."""
    drawn = []
    for step in steps:
        for _ in range(2):
            [lease] = target.lease("a", 1, 0.0)
            drawn.append(lease.group_id)
            rate = rates[lease.group_id % NUM_TASKS]
            finish(target, lease, float(rate > 0), float(rate == 1))
        assert target.take(2, 0.0) is not None
        target.advance(step + 1)
    return drawn


@settings(deadline=None, max_examples=15)
@given(
    rates=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=NUM_TASKS, max_size=NUM_TASKS),
    stop=st.integers(1, 19),
)
def test_a_resumed_buffer_draws_what_the_other_draws(rates, stop):
    whole, first, second = buffer(), buffer(), buffer()
    expected = run_steps(whole, range(20), rates)
    begun = run_steps(first, range(stop), rates)
    second.restore(first.state())
    assert begun + run_steps(second, range(stop, 20), rates) == expected
    assert {group_id % NUM_TASKS for group_id in expected[:NUM_TASKS]} == set(range(NUM_TASKS)), (
        "the first epoch"
    )
    assert second.curriculum() == whole.curriculum()


def test_what_was_under_way_is_queued_and_its_result_counts_once():
    target = buffer()
    leases = target.lease("a", 2, 0.0)
    finish(target, leases[0], 0.0, 1.0)
    resumed = buffer()
    resumed.restore(target.state())
    [again] = resumed.lease("a", 1, 0.0)
    assert again == leases[1]
    finish(resumed, again, 1.0, 1.0)
    finish(target, leases[1], 1.0, 1.0)
    for one in (target, resumed):
        assert one.take(2, 0.0) is not None
        one.advance(1)
    assert [lease.group_id for lease in resumed.lease("a", 2, 0.0)] == [
        lease.group_id for lease in target.lease("a", 2, 0.0)
    ]


def test_a_curriculum_is_neither_added_to_a_checkpoint_nor_taken_away():
    plain, weighed = buffer(has_curriculum=False), buffer()
    with pytest.raises(
        CheckpointError,
        match=r"written without data\.curriculum; switch it off, or start a new run from the checkpoint's "
        r"policy",
    ):
        buffer().restore(plain.state())
    with pytest.raises(CheckpointError, match=r"written with data\.curriculum; set it again"):
        buffer(has_curriculum=False).restore(weighed.state())


def test_without_a_curriculum_positions_follow_one_another_and_the_state_knows_none():
    ledger = Ledger(LedgerRules(groups_per_step=5, max_staleness=0, group_size=1))
    ledger.advance(0)
    assert [ledger.lease("a") for _ in range(5)] == [0, 1, 2, 3, 4]
    ledger.add_member("a", 0, 0, 0, 1.0)
    assert "curriculum" not in ledger.groups.state()


# ----------------------------------------------------------------------------------------------------- config


def config(**curriculum_options) -> Config:
    return Config.model_validate({"data": {"curriculum": curriculum_options}})


@pytest.mark.parametrize("weight", ["0", "-1", ".inf", ".nan"])
def test_a_weight_is_a_positive_number(tmp_path: Path, weight: str):
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {{curriculum: {{source_weights: {{openai/gsm8k: {weight}}}}}}}\n")
    with pytest.raises(
        ConfigError,
        match=r"data\.curriculum\.source_weights\.openai/gsm8k=\S+ must be a positive number; to leave a "
        r"source out",
    ):
        load_config(str(file))


def test_weights_on_the_command_line(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {steps: 1}\n")
    chosen = load_config(str(file), ["data.curriculum.source_weights={openai/gsm8k: 2, aime_2024: 0.5}"])
    assert chosen.data.curriculum.source_weights == {"openai/gsm8k": 2.0, "aime_2024": 0.5}


def test_pass_rates_need_rewards_when_a_group_is_complete():
    late = {"custom_function": {"path": "r.py", "scope": "batch"}}
    with pytest.raises(
        ValueError, match=r"data\.curriculum\.by_pass_rate needs rewards when a group is complete"
    ):
        Config.model_validate({"data": {"curriculum": {"by_pass_rate": True}}, "reward": late})
    Config.model_validate({"data": {"curriculum": {"source_weights": {"s": 1}}}, "reward": late})


# ---------------------------------------------------------------------------------------------------- sources


def rows(path: Path, sources: list[str]) -> str:
    prompt = [{"role": "user", "content": "?"}]
    path.write_text(
        "".join(json.dumps({"data_source": source, "prompt": prompt}) + "\n" for source in sources)
    )
    return str(path)


def test_the_sources_of_rows_with_and_without_looking_at_each(tmp_path: Path):
    paths = [rows(tmp_path / "a.jsonl", ["x", "y", "x"]), rows(tmp_path / "b.jsonl", ["z", "x"])]
    agents = AgentChoice(lambda name: name, "single_turn_agent")
    plain = Dataset(paths, Config().data, agents=agents, seed=0, shuffle=True, max_rows=4)
    assert plain.sources() == ["x", "y", "x", "z"]
    limit = Config.model_validate({"data": {"max_prompt_tokens": 1}}).data
    short = Dataset(
        paths, limit, agents=agents, seed=0, shuffle=True, measure=lambda task: 1 + (task.data_source == "y")
    )
    assert short.sources() == ["x", "x", "z", "x"], "of what is kept"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"x": 1, "y": 1, "aime": 2},
            "names aime, but no training row that is kept has this source; the data has x, y",
        ),
        ({"x": 1}, "has no weight for y"),
    ],
)
def test_sources_are_compared_with_the_weights_before_anything_is_started(tmp_path: Path, weights, message):
    files = [rows(tmp_path / "a.jsonl", ["x", "y", "x"])]
    chosen = Config.model_validate(
        {"data": {"train_files": files, "curriculum": {"source_weights": weights}}}
    )
    with pytest.raises(DataError, match=message):
        check_training_data(chosen.data, Playable(chosen.agent, load_plugins(), tiny_chat()))
