"""The player: one attempt from task to trajectory.

Every error inside becomes its outcome; only cancellation escapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import trio
from outcome import Error

from agentrl.config.agent import AgentConfig
from agentrl.errors import EnvironmentFailed, PluginError, RewardError, ServerError, ToolError
from agentrl.plugins import AgentLoop, Plugins
from agentrl.plugins.blame import failure_of, running_plugin
from agentrl.plugins.contained import contained
from agentrl.plugins.foreign_loop import foreign_loop
from agentrl.plugins.last_words import PlayedAttempt, played_attempt
from agentrl.plugins.stepping import stepping
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.ending import TrajectoryEnd
from agentrl.rollout.environment import AttemptEnvironment
from agentrl.rollout.partner import Partner
from agentrl.rollout.recorder import Attempt, TrajectoryRecorder
from agentrl.rollout.sampling import Sampling
from agentrl.rollout.scoring import Scorer
from agentrl.rollout.session import AttemptSession, SessionParts
from agentrl.rollout.shared_tools import SharedTools
from agentrl.rollout.teacher import Teacher
from agentrl.rollout.toolbox import Toolbox
from agentrl.types import SCORED_OUTCOMES, Failure, Outcome, PluginId, Trajectory

OpenSession = Callable[[SessionParts], AttemptSession]

MAX_SWALLOWED = 100
"""Cancellations that an agent loop may catch, as its `finally` blocks do, before it is left behind."""
OUTCOME_OF: Mapping[type[Exception], Outcome] = {
    ServerError: Outcome.MODEL_ERROR,
    ToolError: Outcome.TOOL_ERROR,
    EnvironmentFailed: Outcome.ENVIRONMENT_ERROR,
    RewardError: Outcome.REWARD_ERROR,
}


class Player:
    """Plays attempts. Between attempts it keeps only the shared state of the tools."""

    def __init__(
        self,
        agent: AgentConfig,
        plugins: Plugins,
        scorer: Scorer,
        *,
        tools: SharedTools,
        host: AsyncioHost,
        open_session: OpenSession,
        forget: Callable[[str], None],
        teacher: Teacher | None = None,
    ) -> None:
        """`forget`: called with the key of each attempt that is over. `teacher`: scores what can be trained
        on.
        """
        self._teacher = teacher
        self._agent = agent
        self._plugins = plugins
        self._scorer = scorer
        self._tools = tools
        self._host = host
        self._open_session = open_session
        self._forget = forget

    async def play(self, attempt: Attempt, sampling: Sampling) -> Trajectory:
        """Play the attempt within `agent.trajectory_timeout_s`, close its tools and partner, and score it.
        Its environment is closed last: the rewards see it.

        A failure is returned as a trajectory with its outcome, its `failure`, the tokens so far and no
        reward.
        """
        played_attempt.set(PlayedAttempt.of(attempt.group_id, attempt.member, attempt.task))
        try:
            with contained():
                agent = self._plugins.agents.create(attempt.task.agent_name, self._agent.agent_config)
                session = self._open(attempt, agent, sampling)
        except Exception as error:  # noqa: BLE001 - boundary of one trajectory: a plugin's constructor raised
            return unplayed(attempt, Outcome.ABORTED, failure_of(error, otherwise=_agent_of(attempt)))
        try:
            return await self._play(attempt, agent, session)
        finally:
            await session.close_environment()

    async def _play(self, attempt: Attempt, agent: AgentLoop, session: AttemptSession) -> Trajectory:
        try:
            outcome, failure = await self._run_agent(attempt, agent, session)
        finally:
            self._forget(attempt.key)
            await session.close()
        trajectory = session.trajectory(outcome, failure)
        if outcome not in SCORED_OUTCOMES:
            return trajectory
        try:
            with attempt.scope.open("reward"):
                scored = await self._scorer.score(
                    attempt.task, trajectory, session.turn_rewards, environment=session.environment
                )
        except Exception as error:  # noqa: BLE001 - boundary of one trajectory
            return trajectory.replace(outcome=Outcome.REWARD_ERROR, failure=failure_of(error))
        if self._teacher is None or attempt.is_greedy:
            return scored
        try:
            with attempt.scope.open("teacher"):
                return await self._teacher.taught(scored, key=attempt.key)
        except ServerError as error:
            return trajectory.replace(outcome=Outcome.MODEL_ERROR, failure=failure_of(error))

    def _open(self, attempt: Attempt, agent: AgentLoop, sampling: Sampling) -> AttemptSession:
        task = attempt.task
        environment = AttemptEnvironment.of(attempt, self._plugins, self._agent, host=self._host)
        plugin = None if environment is None else environment.plugin
        names = self._plugins.offered_tools(task, self._agent.tools)
        toolbox = Toolbox(
            names,
            self._tools,
            tools_kwargs=task.tools_kwargs,
            key=attempt.key,
            scope=attempt.scope,
            survived=attempt.survived,
            environment=plugin,
        )
        partner = Partner.of(
            task, self._plugins.interactions, self._agent, host=self._host, environment=plugin
        )
        prompt = agent.prompt(task, toolbox.schemas)
        parts = SessionParts(
            attempt,
            self._agent,
            sampling,
            toolbox,
            partner,
            self._host,
            prompt,
            environment,
            agent.template_shows_tools,
        )
        return self._open_session(parts)

    async def _run_agent(
        self, attempt: Attempt, agent: AgentLoop, session: AttemptSession
    ) -> tuple[Outcome, Failure | None]:
        """Run the agent loop and return why the attempt stopped, with the failure if there was one."""
        with trio.move_on_after(self._agent.trajectory_timeout_s) as deadline:
            swallowing = Swallowing(deadline, session.playing)
            try:
                await session.open_environment()
                running_plugin.set(_agent_of(attempt))
                with _ended_by_session(agent, swallowing), session.playing:
                    await stepping(_run(agent, attempt, session), swallowing)
                if swallowing.is_too_much:
                    await trio.lowlevel.checkpoint()  # raises Cancelled if it was not the session's end
                if session.num_action_tokens:
                    await session.collect_scores()
            except Exception as error:  # noqa: BLE001 - boundary of one trajectory
                cause = _cause(error)
                outcome = _outcome_of(cause)
                return outcome, failure_of(
                    cause, otherwise=_agent_of(attempt) if outcome is Outcome.ABORTED else None
                )
        if deadline.cancelled_caught:
            late = f"agent.trajectory_timeout_s={self._agent.trajectory_timeout_s:g} passed"
            if swallowing.is_too_much:
                return Outcome.TIMEOUT, Failure(f"{late}, which {agent.name!r} ignores", _agent_of(attempt))
            return Outcome.TIMEOUT, Failure(late)
        if session.num_action_tokens:
            return session.outcome, None
        if (
            session.outcome is Outcome.TRUNCATED
        ):  # no action token: nothing to learn, nowhere to place a reward
            return Outcome.ABORTED, Failure("the prompt leaves no room for an answer")
        return Outcome.ABORTED, Failure("the agent loop ended without generating", _agent_of(attempt))


async def _run(agent: AgentLoop, attempt: Attempt, session: AttemptSession) -> None:
    await agent.run(attempt.task, session)


class Swallowing:
    """Counts how often the cancellation of an agent loop, by `scopes` or with its group, did not end it."""

    def __init__(self, *scopes: trio.CancelScope) -> None:
        nursery = trio.lowlevel.current_task().parent_nursery
        self._scopes = scopes if nursery is None else (*scopes, nursery.cancel_scope)
        self._num = 0

    @property
    def is_too_much(self) -> bool:
        return self._num > MAX_SWALLOWED

    def __call__(self, heard: object) -> bool:
        if isinstance(heard, Error) and isinstance(heard.error, trio.Cancelled):
            # A timeout within the agent loop is none of its end.
            self._num += any(scope.cancel_called for scope in self._scopes)
        return self.is_too_much


@contextmanager
def _ended_by_session(agent: AgentLoop, swallowing: Swallowing) -> Iterator[None]:
    """Leave the block, which runs the agent loop, when the session ends the trajectory.

    The session then has the outcome.
    """
    try:
        with contained(trio.Cancelled):
            yield
    except Exception as error:  # an agent may wrap TrajectoryEnd, e.g. in an exception group
        if swallowing.is_too_much:  # it was closed within a cancel scope, which it did not leave
            return
        cause = _cause(error)
        if (found := foreign_loop(cause, "trio")) is not None:
            cure = "call it as `await session.run_asyncio(function, *args)`, or use trio's own"
            raise PluginError(f"agent {agent.name!r} {found}: {cure}") from error
        if not isinstance(cause, TrajectoryEnd):
            raise


def _agent_of(attempt: Attempt) -> PluginId:
    return PluginId("agent", attempt.task.agent_name)


def _outcome_of(error: BaseException) -> Outcome:
    return next((outcome for kind, outcome in OUTCOME_OF.items() if isinstance(error, kind)), Outcome.ABORTED)


def _cause(error: BaseException) -> BaseException:
    """Return the root error of an exception group. Agent loops with their own nursery raise groups."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    leaves = [_cause(inner) for inner in error.exceptions]
    known: tuple[type[Exception], ...] = (TrajectoryEnd, *OUTCOME_OF)
    return next((leaf for leaf in leaves if isinstance(leaf, known)), leaves[0])


def unplayed(attempt: Attempt, outcome: Outcome, failure: Failure) -> Trajectory:
    """Return the trajectory of an attempt that recorded nothing: the task's messages and no tokens."""
    return TrajectoryRecorder().trajectory(
        attempt, messages=attempt.task.messages, outcome=outcome, failure=failure, metrics={}
    )
