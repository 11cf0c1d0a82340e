"""What `eval` may choose beside temperature: stop texts, no end but the limit, lengths of its own; weights
that nobody published.
"""

from __future__ import annotations

import pytest

from agentrl.config.evaluation import EvalConfig
from agentrl.errors import ServerError
from agentrl.servers.protocol import generate_body, parse_generation
from agentrl.types import Outcome, SamplingParams


def test_a_turn_ends_with_the_token_that_completes_a_stop_text(stage) -> None:
    world = stage.World(lambda turn, prompt: "#### 42 END and much more")
    [trajectory] = world.play(stage.task(), sampling=EvalConfig(stop=("never", "END")))
    assert trajectory.messages[-1].content.endswith("#### 42 END")
    assert stage.chat.decode(trajectory.token_ids[trajectory.action_mask].tolist()) == "#### 42 END"
    assert trajectory.outcome is Outcome.COMPLETED


def test_lengths_of_evaluation_go_before_those_of_the_agent(stage) -> None:
    agent = {"max_response_tokens": 64, "max_turn_tokens": 32}
    for sampling, lengths in (
        (EvalConfig(), (32, 32)),
        (EvalConfig(max_turn_tokens=5), (5, 5)),
        (EvalConfig(max_response_tokens=7), (7, 7)),
        (EvalConfig(max_response_tokens=100, max_turn_tokens=90), (90, 90)),
    ):
        world = stage.World(lambda turn, prompt: "x" * 200, agent=agent)
        [trajectory] = world.play(stage.task(agent="single_turn_agent"), sampling=sampling)
        assert (world.client.params[0].max_new_tokens, trajectory.num_action_tokens) == lengths
        assert trajectory.outcome is Outcome.TRUNCATED


def test_without_an_end_of_sequence_only_the_limit_ends_a_turn(stage) -> None:
    world = stage.World(lambda turn, prompt: "#### 42")
    world.play(stage.task(), sampling=EvalConfig(ignore_eos=True))
    assert world.client.params[0].ignore_eos
    assert not world.client.params[0].stop_token_ids
    assert generate_body([1], world.client.params[0], rid="r")["sampling_params"]["ignore_eos"] is True
    assert "ignore_eos" not in generate_body([1], SamplingParams(1), rid="r")["sampling_params"], (
        "as training asks"
    )


def test_weights_that_nobody_published_are_evaluated_and_not_trained_from() -> None:
    meta = {
        "finish_reason": {"type": "stop"},
        "output_token_logprobs": [(-0.5, 7, None)],
        "weight_versions": [{"version": "default", "start": 0, "end": 1}],
    }
    reply = {"output_ids": [7], "meta_info": meta}
    assert parse_generation(reply, server="http://a", unpublished=0).versions.tolist() == [0]
    with pytest.raises(ServerError, match="no published weights"):
        parse_generation(reply, server="http://a")
