"""The table of outcomes: what is retried, how often and after which pauses, and what happens to a group's
members.
"""

from __future__ import annotations

import pytest

from agentrl.config.rollout import RolloutConfig
from agentrl.rollout.outcomes import MAX_RETRY_PAUSE_S, GroupPolicy, OutcomeTable, RetryBudget
from agentrl.rollout.player import unplayed
from agentrl.rollout.recorder import Attempt
from agentrl.types import SCORED_OUTCOMES, Failure, Lease, Message, Outcome, Task

TASK = Task("t:0", "s", (Message("user", "?"),), "a")
FAILED = [outcome for outcome in Outcome if outcome not in SCORED_OUTCOMES]


def ended(outcome: Outcome, member: int = 0):
    return unplayed(Attempt(0, member, TASK), outcome, Failure("broken"))


@pytest.mark.parametrize("outcome", FAILED)
def test_a_kept_failure_is_retried_after_pauses_that_double_up_to_a_minute(outcome):
    budget = RetryBudget(OutcomeTable.keeping(max_retries=8))
    retries = [budget.after(outcome) for _ in range(9)]
    assert [retry.pause_s for retry in retries if retry] == [
        1,
        2,
        4,
        8,
        16,
        32,
        MAX_RETRY_PAUSE_S,
        MAX_RETRY_PAUSE_S,
    ]
    assert retries[-1] is None
    assert GroupPolicy(Lease(0, TASK, 4, 0), OutcomeTable.keeping()).settle(ended(outcome)) == "keep"


@pytest.mark.parametrize("outcome", sorted(SCORED_OUTCOMES))
@pytest.mark.parametrize(
    "table", [OutcomeTable.keeping(max_retries=3), OutcomeTable.of_training(RolloutConfig())]
)
def test_a_scored_attempt_is_never_retried(table, outcome):
    assert RetryBudget(table).after(outcome) is None


def test_retries_and_replacements_are_counted_apart_and_each_member_has_its_own():
    policies = {"tool_error": "retry", "model_error": "replace"}
    table = OutcomeTable.of_training(
        RolloutConfig(on_outcome=policies, max_retries=1, max_replacements=2, replacement_pause_s=3.0)
    )
    for _ in range(2):
        budget = RetryBudget(table)
        found = [
            budget.after(outcome)
            for outcome in [Outcome.TOOL_ERROR, *[Outcome.MODEL_ERROR] * 3, Outcome.TOOL_ERROR]
        ]
        assert [(retry.how, retry.pause_s) if retry else None for retry in found] == [
            ("retried", 0.0),
            ("replaced", 3.0),
            ("replaced", 6.0),
            None,
            None,
        ]


def test_a_group_that_cannot_be_scored_together_is_dropped_in_training_and_kept_elsewhere():
    lease = Lease(0, TASK, 4, 0)
    trained, kept = (
        GroupPolicy(lease, OutcomeTable.of_training(RolloutConfig(group_size=4))),
        GroupPolicy(lease, OutcomeTable.keeping()),
    )
    assert (trained.settle_unscored(), trained.dropped_by) == ("drop", Outcome.REWARD_ERROR)
    assert (kept.settle_unscored(), kept.dropped_by) == ("keep", None)


def test_the_outcome_that_dropped_a_group_is_the_first():
    policy = GroupPolicy(Lease(0, TASK, 4, 0), OutcomeTable.of_training(RolloutConfig(group_size=4)))
    assert [policy.settle(ended(outcome)) for outcome in (Outcome.TOOL_ERROR, Outcome.ABORTED)] == [
        "drop",
        "drop",
    ]
    assert policy.dropped_by is Outcome.TOOL_ERROR
