"""`VirtualPlayer`: plays attempts by a script instead of an agent; the turns come from the real router."""

from __future__ import annotations

import numpy as np
import trio

from agentrl.config.agent import AgentConfig
from agentrl.config.reward import RewardConfig
from agentrl.data.attempt_facts import AttemptFacts
from agentrl.data.attempt_files import TrajectoryRef
from agentrl.errors import ServerError
from agentrl.extras.plan.turns import Turns
from agentrl.extras.plan.workload import Script, ScriptSource
from agentrl.rollout.player_stack import PlayerStack, PlayerStacks, Validating
from agentrl.rollout.recorder import Attempt
from agentrl.rollout.sampling import Sampling
from agentrl.servers.router import Router
from agentrl.types import (
    NO_VERSION,
    Failure,
    Generation,
    Outcome,
    RewardEvent,
    SamplingParams,
    Task,
    Trajectory,
)

_MAX_MEMBERS = 1 << 10


def content_of(group_id: int, member: int) -> int:
    """Return the token that an attempt consists of, so that its place can be told from its content."""
    return group_id * _MAX_MEMBERS + member


def place_of(attempt: AttemptFacts) -> tuple[int, int]:
    """Return the group and the member whose content an attempt has; its store keeps the token."""
    assert isinstance(attempt.source, TrajectoryRef), "attempts are stored"
    group_id, member = divmod(attempt.source.checksum, _MAX_MEMBERS)
    return group_id, member


class VirtualPlayer:
    """Plays attempts: `agentrl.rollout.group_player.AttemptPlayer`."""

    def __init__(self, agent: AgentConfig, router: Router, scripts: ScriptSource, turns: Turns) -> None:
        self._agent = agent
        self._router = router
        self._scripts = scripts
        self._turns = turns

    async def play(self, attempt: Attempt, sampling: Sampling) -> Trajectory:
        """Play the script of the attempt within `agent.trajectory_timeout_s`."""
        script = self._scripts.next(attempt.group_id, attempt.member)
        played: list[Generation | int] = []
        outcome, failure = Outcome.COMPLETED, None
        try:
            with trio.move_on_after(self._agent.trajectory_timeout_s) as deadline:
                try:
                    if not await self._play(attempt, script, played):
                        outcome, failure = Outcome.TOOL_ERROR, Failure("the tool failed")
                except ServerError as error:
                    outcome, failure = Outcome.MODEL_ERROR, Failure(str(error))
        finally:
            self._turns.end(attempt.key)
            self._router.forget(attempt.key)
        if deadline.cancelled_caught:
            outcome, failure = Outcome.TIMEOUT, Failure("agent.trajectory_timeout_s passed")
        return _trajectory(attempt, script, played, outcome, failure)

    async def _play(self, attempt: Attempt, script: Script, played: list[Generation | int]) -> bool:
        """Play all turns; return False if a tool failed."""
        value = content_of(attempt.group_id, attempt.member)
        prompt = [attempt.group_id] * script.prompt_tokens
        for turn in script.turns:
            self._turns.begin(attempt.key, turn.tokens, value)
            generation = await self._router.generate(
                prompt, SamplingParams(self._turns.limit), trajectory_key=attempt.key
            )
            assert len(generation.token_ids) == turn.tokens, "a continued turn is as long as an uninterrupted"
            played.append(generation)
            if turn is not script.turns[-1]:
                await trio.sleep(min(turn.tool_s, self._agent.tool_timeout_s))
                if turn.does_tool_fail:
                    return False
                played.append(turn.tool_tokens)
                prompt = [*prompt, *[value] * (turn.tokens + turn.tool_tokens)]
        return True


def _trajectory(
    attempt: Attempt,
    script: Script,
    played: list[Generation | int],
    outcome: Outcome,
    failure: Failure | None,
) -> Trajectory:
    counts = [piece if isinstance(piece, int) else len(piece.token_ids) for piece in played]
    total = script.prompt_tokens + sum(counts)
    versions = np.full(total, NO_VERSION, np.int32)
    turn_ids = np.full(total, -1, np.int16)
    end = script.prompt_tokens
    for index, (piece, count) in enumerate(zip(played, counts, strict=True)):
        if isinstance(piece, Generation):
            versions[end : end + count] = piece.versions
            turn_ids[end : end + count] = index // 2
        end += count
    mask = versions != NO_VERSION
    is_scored = failure is None and mask.any()
    return Trajectory(
        attempt.group_id,
        attempt.member,
        attempt.task.task_id,
        attempt.task.data_source,
        attempt.task.agent_name,
        token_ids=np.full(total, content_of(attempt.group_id, attempt.member), np.int32),
        action_mask=mask,
        behavior_logprobs=np.zeros(total, np.float32),
        versions=versions,
        turn_ids=turn_ids,
        messages=(),
        rewards=(RewardEvent("reward", script.reward, total - 1),) if is_scored else (),
        outcome=outcome,
        failure=failure,
    )


class VirtualScorer:
    """Scores nothing: the script has the reward."""

    def has_group_rewards(self, task: Task) -> bool:
        return False

    async def score_group(self, task: Task, trajectories: object) -> list[Trajectory]:
        raise AssertionError("no reward compares the members of a group")

    async def aclose(self) -> None:
        """Return at once: there are no processes."""


class _NoTools:
    num_breaker_openings = 0


class VirtualParts:
    """Opens virtual players: `agentrl.rollout.player_stack.StackParts`."""

    def __init__(self, scripts: ScriptSource, turns: Turns) -> None:
        self._scripts = scripts
        self._turns = turns

    def open_stacks(
        self, agent: AgentConfig, reward: RewardConfig, turns: Router, validation: Validating | None
    ) -> PlayerStacks:
        stack = PlayerStack(VirtualPlayer(agent, turns, self._scripts, self._turns), VirtualScorer())
        return PlayerStacks(stack, stack, _NoTools())
