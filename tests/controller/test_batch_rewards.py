"""What the controller does with rewards: batches scored together, and attempts printed for a person."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.model import ModelConfig
from agentrl.config.reward import RewardConfig
from agentrl.controller.batch_rewards import BatchRewards
from agentrl.controller.validation import describe, examined
from agentrl.errors import RewardError
from agentrl.plugins import load_plugins
from agentrl.types import Failure, Message, Outcome, RewardEvent, Task, ToolCall, Trajectory
from parts.trajectories import make_trajectory

FUNCTION = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, error=None):
    if error:
        raise OSError(error)
    return [{"score": len(solution_strs), "truth": truth} for truth in ground_truths]
"""

ROW = Task("t:0", "s", (Message("user", "q"),), "a", ground_truth="72")


def attempt(answer: str = "72", **fields) -> Trajectory:
    messages = (Message("user", "q"), Message("assistant", answer))
    return make_trajectory([-1, 0, 0], **{"messages": messages, **fields})


def rewards_of(tmp_path, **kwargs) -> BatchRewards:
    file = tmp_path / "batch.py"
    file.write_text(FUNCTION)
    function = {"path": str(file), "scope": "batch", "kwargs": kwargs}
    return BatchRewards(
        RewardConfig.model_validate({"custom_function": function, "solution_str": "messages"}),
        load_plugins(),
        max_response_tokens=1024,
        model=ModelConfig(),
    )


def test_a_batch_reward_sees_all_and_places_one_event_each(tmp_path):
    rewards = rewards_of(tmp_path)
    assert rewards.is_any
    scored = rewards.score([ROW, replace(ROW, ground_truth="5")], [attempt(), attempt()])
    assert [[(e.name, e.value, e.position) for e in t.rewards] for t in scored] == [[("custom", 2.0, 2)]] * 2
    assert [t.extra_info["reward_details"]["custom"]["truth"] for t in scored] == ["72", "5"]
    assert not BatchRewards(
        RewardConfig(), load_plugins(), max_response_tokens=1024, model=ModelConfig()
    ).is_any


def test_a_failed_attempt_of_a_batch_is_neither_shown_nor_scored(tmp_path):
    failed = attempt(outcome=Outcome.TIMEOUT, failure=Failure("late"))
    scored = rewards_of(tmp_path).score(
        [replace(ROW, ground_truth=str(i)) for i in range(3)], [attempt(), failed, attempt()]
    )
    assert scored[1] is failed
    assert [t.extra_info["reward_details"]["custom"]["truth"] for t in (scored[0], scored[2])] == ["0", "2"]
    assert {t.reward for t in (scored[0], scored[2])} == {2.0}


def test_in_validation_only_what_can_be_scored_is_shown_to_it(tmp_path):
    failed = attempt(outcome=Outcome.TIMEOUT, failure=Failure("late"))
    scored = rewards_of(tmp_path).score_validation([ROW] * 3, [attempt(), failed, attempt()])
    assert [t.reward for t in scored] == [2.0, 0.0, 2.0]
    assert scored[1] is failed
    assert rewards_of(tmp_path).score_validation([ROW], [failed]) == [failed]


def test_a_batch_reward_that_fails_is_never_a_zero(tmp_path):
    rewards = rewards_of(tmp_path, error="away")
    with pytest.raises(RewardError, match="reward 'custom' raised OSError: away"):
        rewards.score([ROW], [attempt()])
    (failed,) = rewards.score_validation([ROW], [attempt(rewards=(RewardEvent("x", 1.0, 2),))])
    assert (failed.outcome, failed.rewards) == (Outcome.REWARD_ERROR, ())
    assert "away" in str(failed.failure)


# ----------------------------------------------------------------------------------------------- for a person


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=12), st.integers(0, 15))
def test_every_data_source_is_shown_before_any_twice(sources, count):
    tasks = [replace(ROW, data_source=source) for source in sources]
    attempts = [attempt(data_source=source, task_id=f"t:{index}") for index, source in enumerate(sources)]
    texts = list(examined(tasks, attempts, count))
    assert len(texts) == min(count, len(sources))
    shown = [sources[int(text.split("t:")[1].split(" ")[0])] for text in texts]
    first = shown[: len(set(sources))]
    assert len(first) == len(set(first))
    for source in set(sources):
        is_exhausted = shown.count(source) == sources.count(source)
        assert is_exhausted or shown.count(source) >= max(map(shown.count, shown), default=0) - 1


def test_failed_attempts_are_not_shown():
    assert list(examined([ROW], [attempt(outcome=Outcome.TIMEOUT)], 3)) == []


def test_an_attempt_is_told_in_full():
    call = ToolCall("1", "calculator", {"expression": "8*9"})
    messages = (
        Message("user", "8 * 9?"),
        Message("assistant", "", (call,), reasoning="Let me see."),
        Message("tool", "72"),
        Message("assistant", "#### 72"),
    )
    told = describe(
        ROW,
        attempt(
            messages=messages,
            rewards=(RewardEvent("gsm8k", 1.0, 2), RewardEvent("short", -0.5, 2)),
            metrics={"reward/gsm8k": 1.0, "num_turns": 2.0},
            extra_info={"reward_details": {"gsm8k": {"pred": "72"}}},
        ),
    )
    expected = [
        "t:0 (s, a, completed)",
        "[user] 8 * 9?",
        "[assistant, thinking] Let me see.",
        '[call] calculator {"expression": "8*9"}',
        "[tool] 72",
        "[assistant] #### 72",
        "[ground truth] 72",
        "[reward] gsm8k: 1 on token 2",
        "[reward] short: -0.5 on token 2",
        "[reward/gsm8k] 1",
        "[reward/gsm8k/pred] 72",
        "[sum] 0.5",
    ]
    assert told.splitlines()[1:-1] == expected


def test_a_batch_reads_decoded_responses(tmp_path):
    """Their tokens are decoded in the process of the scorer, with the tokenizer of the policy."""
    write_tiny_tokenizer(tmp_path)
    file = tmp_path / "batch.py"
    file.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        '    return [{"score": 0.0, "text": text} for text in solution_strs]\n'
    )
    model = ModelConfig(path=str(tmp_path))
    config = RewardConfig.model_validate({"custom_function": {"path": str(file), "scope": "batch"}})
    rewards = BatchRewards(config, load_plugins(), max_response_tokens=1024, model=model)
    sampled = Chat.of(model).encode("<tool_call>f()</tool_call><|im_end|>")
    played = make_trajectory([-1, *[0] * len(sampled)])
    (scored,) = rewards.score([ROW], [played.replace(token_ids=np.array([0, *sampled], np.int32))])
    assert scored.extra_info["reward_details"]["custom"]["text"] == "<tool_call>f()</tool_call>"
