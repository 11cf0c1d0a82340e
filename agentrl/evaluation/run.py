"""One evaluation, from request to stored attempts.

The data sets are checked, the servers started or located, and the missing attempts played.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from agentrl.adapters.catalog import named_plugins
from agentrl.chat.chat import Chat
from agentrl.config.frozen_servers import FrozenPlan
from agentrl.config.opponents import opponent_key
from agentrl.config.schema import Config
from agentrl.data.checked_dataset import Playable
from agentrl.data.failures import FailureBook
from agentrl.data.image_files import FOLDER as IMAGES
from agentrl.errors import ConfigError
from agentrl.evaluation.attempt_keys import AttemptSettings
from agentrl.evaluation.concurrency import Concurrency
from agentrl.evaluation.data_sets import DataSet, EvaluationProblem, open_data_set, problems_of, resolve_files
from agentrl.evaluation.model_place import (
    UNPUBLISHED_VERSION,
    KnownModel,
    ModelPlace,
    Say,
    Servers,
    describe_model,
    open_servers,
    read_place,
)
from agentrl.evaluation.opponents import describe_opponents
from agentrl.evaluation.play import Counts, ProblemPlayer
from agentrl.evaluation.progress import EvalProgress
from agentrl.evaluation.scratch import scratch_folder
from agentrl.evaluation.standstill import WatchedEvaluation
from agentrl.evaluation.store import AttemptStore
from agentrl.evaluation.time_left import TimeLeft
from agentrl.plugins import Plugins
from agentrl.rewards.select import RewardTable, without_rewards
from agentrl.rollout.asyncio_host import AsyncioHost
from agentrl.rollout.conversation_line import PromptLimits
from agentrl.rollout.frozen_models import resolve_opponents
from agentrl.rollout.frozen_servers import follow
from agentrl.rollout.limits import model_limits, num_ids_of
from agentrl.rollout.loop_gaps import LoopGaps
from agentrl.rollout.loop_watch import watching_command
from agentrl.rollout.message_model import MessageModel
from agentrl.rollout.message_session import uncounted_chat
from agentrl.rollout.open_files import allow_trajectories
from agentrl.rollout.player_stack import PlayerParts, open_stack
from agentrl.rollout.scopes import PlayLoop
from agentrl.rollout.shown_images import ShownImages
from agentrl.rollout.tracing import ProcessTracing, open_tracing
from agentrl.servers.client import SGLangClient
from agentrl.servers.frozen import StartedFrozen, start_frozen
from agentrl.servers.router import Router
from agentrl.servers.server import Client
from agentrl.servers.trio_run import in_trio
from agentrl.tracking.unwritten import UnwrittenFiles
from agentrl.tracking.watchdog import Watchdog
from agentrl.types import JsonObject, Trajectory

"""Opens the client of a server, by its URL."""

STORE = "attempts.sqlite"
"""Name of the store, in the folder of the results."""


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """The evaluation to run.

    Args:
        model: folder, hub id or URLs; None: the config's model.
        on: names of benchmarks, and files of rows.
        folder: where the attempts are stored.
        agent: plays all rows; None: each row's own.
        data_dir: folder with original files of the benchmarks.
        served_model: name of the model at an OpenAI-compatible URL; None: the only one there.
        max_rows: use only this many rows of each data set, from the beginning.
        is_scored: False: generate only.
    """

    config: Config
    model: str | None
    on: tuple[str, ...]
    folder: Path
    agent: str | None = None
    served_model: str | None = None
    data_dir: Path | None = None
    max_rows: int | None = None
    is_scored: bool = True


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known before the first attempt is played.

    opponents: those that a problem needs and that servers are started for.
    """

    request: EvaluationRequest
    place: ModelPlace
    known: KnownModel
    config: Config
    chat: Chat
    plugins: Plugins
    data_sets: tuple[DataSet, ...]
    problems: tuple[EvaluationProblem, ...]
    opponents: tuple[FrozenPlan, ...]
    store: AttemptStore

    @property
    def keys(self) -> list[str]:
        return [key for problem in self.problems for key in problem.keys]

    def finished(self) -> Iterator[Trajectory]:
        """Yield the attempts by problem and member, with the numbers and task ids of this evaluation."""
        owners = ((problem, member) for problem in self.problems for member in range(len(problem.keys)))
        for (problem, member), trajectory in zip(owners, self.store.read(self.keys), strict=True):
            assert trajectory is not None, "all attempts were played"
            yield trajectory.replace(group_id=problem.number, member=member, task_id=problem.task.task_id)


@contextmanager
def prepare(request: EvaluationRequest, *, say: Say) -> Iterator[Prepared]:
    """Identify the model, read and check all rows, and open the store.

    Raises:
        UserError: the config, the model, a data set or a row is invalid, or another process writes to the
            folder.
        ServerError: a running server does not answer.
    """
    config = _as_evaluated(request.config)
    place, model = read_place(request.model, config.model, urls=config.rollout.urls)
    known = describe_model(
        place, model, api_key_env=config.rollout.api_key_env, served_name=request.served_model
    )
    config = config.model_copy(update={"model": known.config})
    opponents: Mapping[str, JsonObject] = {}
    if place.kind != "openai":  # a session of messages refuses opponents
        config = config.model_copy(update={"agent": resolve_opponents(config.agent, config.model)})
        opponents = describe_opponents(config.agent)
    with scratch_folder() as scratch:
        files = resolve_files(request.on, data_dir=request.data_dir, scratch=scratch)
        chat = uncounted_chat() if place.kind == "openai" else Chat.of(config.model)
        plugins = named_plugins(config.agent, config.reward, config.eval)
        table = RewardTable(config.reward, plugins)
        if request.is_scored and (asking := config.asks_reward_model):
            raise ConfigError(
                f"{asking[0]} uses the reward model, which only a training run has; evaluate with another "
                "reward"
            )
        if request.is_scored:
            table.check_services()
        reward, check = (config.reward, table.check) if request.is_scored else (None, None)
        settings = AttemptSettings(
            known.identity, config.model, config.data, config.agent, config.eval, reward, opponents
        )
        playable = Playable(config.agent, plugins, chat, check)
        agent = None if request.agent is None else plugins.agents.resolve(request.agent)
        images = request.folder.resolve() / IMAGES
        data_sets = tuple(
            open_data_set(
                name, file, settings, playable, agent=agent, max_rows=request.max_rows, images=images
            )
            for name, file in files.items()
        )
        problems = tuple(problems_of(data_sets, config.eval.n))
        named = {opponent_key(name) for problem in problems for name in playable.opponents(problem.task)}
        plans = tuple(plan for plan in config.frozen_plans if plan.key in named)
        with AttemptStore(request.folder / STORE) as store:
            yield Prepared(request, place, known, config, chat, plugins, data_sets, problems, plans, store)


def play_missing(prepared: Prepared, *, say: Say) -> Counts:
    """Play the attempts that the store does not have. Servers are started only if an attempt is missing.

    Raises:
        ServerError: no server is available.
        InfrastructureError: too many consecutive attempts failed.
    """
    keys = prepared.keys
    num_finished = sum(map(prepared.store.has, keys))
    for data_set in prepared.data_sets:
        filtered = (
            f", {data_set.report.filtered} left out: longer than data.max_prompt_tokens"
            if data_set.report.filtered
            else ""
        )
        say(f"{data_set.name}: {len(data_set.dataset)} problems, template {data_set.template_name}{filtered}")
    resumed = f", {num_finished} of them already finished" if num_finished else ""
    say(f"{len(keys)} attempts, {prepared.config.eval.n} per problem{resumed}")
    if num_finished == len(keys):
        return Counts()
    most = prepared.config.rollout.max_concurrent_trajectories
    allow_trajectories(most)
    concurrency, agent = Concurrency(most), prepared.config.agent
    time_left = TimeLeft(
        len(keys) - num_finished, max_tokens=agent.max_response_tokens, timeout_s=agent.trajectory_timeout_s
    )
    is_scored = prepared.request.is_scored
    with (
        scratch_folder() as logs,
        start_frozen(prepared.opponents, logs, say=say) as frozen,
        open_servers(prepared.place, prepared.config.rollout, prepared.config.model, say=say) as servers,
        EvalProgress(len(keys), num_finished, concurrency, time_left, is_scored=is_scored) as progress,
    ):
        try:
            gaps = LoopGaps()
            counts = in_trio(
                _play, prepared, servers, frozen, concurrency, time_left, progress, gaps, instruments=[gaps]
            )
        except KeyboardInterrupt:
            say("interrupted: finished attempts are kept, and the same command continues from there")
            raise
    for reason, num in sorted(concurrency.reasons.items()):
        say(f"attempts at once were halved {num} times: {reason}")
    for outcome, num in sorted(counts.retries.items()):
        say(f"{num} tries were repeated: {outcome}")
    return counts


async def _play(
    prepared: Prepared,
    servers: Servers,
    frozen: StartedFrozen,
    concurrency: Concurrency,
    time_left: TimeLeft,
    progress: EvalProgress,
    gaps: LoopGaps,
) -> Counts:
    """Consumes missing attempts; unblocked by servers, tools and interactions.

    Produces attempts in the store. A watchdog reports what it waits for.
    """
    config, chat, plugins = prepared.config, prepared.chat, prepared.plugins
    sources = {problem.task.data_source for problem in prepared.problems}
    reward = config.reward if prepared.request.is_scored else without_rewards(plugins, sources)
    connect = partial(
        SGLangClient,
        api_key=servers.api_key,
        max_connections=config.rollout.max_concurrent_trajectories,
        unpublished=UNPUBLISHED_VERSION,
        num_ids=num_ids_of(config.model),
    )
    tracing = open_tracing(config.tracking.spans, run=f"eval/{prepared.request.folder.name}")
    connect_to: Callable[[str], Client] = connect if tracing is None else tracing.connecting(connect)
    turns = _turns(prepared, concurrency, connect_to, api_key=servers.api_key)
    failures = FailureBook(
        prepared.request.folder,
        say=progress.say,
        unwritten=UnwrittenFiles(progress.say),
        is_resumed=True,
        shows_tracebacks=bool(os.environ.get("AGENTRL_DEBUG")),
    )
    with AsyncioHost() as host:
        images = ShownImages(config.data.images, prepared.request.folder.resolve() / IMAGES)
        patience_s = config.rollout.server_start_timeout_s
        prompt = PromptLimits.of(config.data)
        parts = PlayerParts(plugins, chat, host, prompt, frozen_patience_s=patience_s, images=images)
        stack = open_stack(config.agent, reward, turns, parts)
        attempts = ProblemPlayer(
            stack.player,
            stack.scorer,
            prepared.store,
            concurrency,
            time_left,
            sampling=config.eval,
            max_retries=config.rollout.max_retries,
            on_finished=progress.add,
            on_failed=lambda failed: failures.add([failed], step=0),
            tracer=None if tracing is None else tracing.attempts,
        )
        try:
            loop = PlayLoop.here(gaps, plugins=host.thread)
            asks = connect if isinstance(turns, Router) else None
            with (
                _watching(
                    WatchedEvaluation(attempts, concurrency, servers, turns, loop, connect=asks),
                    prepared,
                    progress.say,
                ),
                watching_command(host, say=progress.say, deadline_s=config.agent.trajectory_timeout_s),
            ):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(follow, frozen.keys, stack.set_frozen_servers)
                    await attempts.run(prepared.problems, servers, turns)
                    nursery.cancel_scope.cancel()
        finally:
            failures.write(is_last=True)
            with trio.CancelScope(shield=True):
                await stack.aclose()
                await turns.aclose()
            if tracing is not None:
                tracing.close()
                _say_lost_spans(tracing, config.tracking.spans.endpoint, progress.say)
    return attempts.counts


def _say_lost_spans(tracing: ProcessTracing, endpoint: str | None, say: Say) -> None:
    counters = tracing.counters()
    if num := counters["spans_lost"] + counters["spans_left_out"]:
        why = tracing.problem() or "the queue was full"
        say(f"spans: {num:,.0f} did not reach {endpoint} ({why}); the attempts are complete")


def _watching(watched: WatchedEvaluation, prepared: Prepared, say: Say) -> AbstractContextManager[object]:
    """Return the watchdog over what is played; a null context if the config disables it."""
    silence_s = prepared.config.eval.watchdog_s
    if silence_s is None:
        return nullcontext()
    return Watchdog(watched, silence_s=silence_s, folder=prepared.request.folder / "watchdog", say=say)


def _turns(
    prepared: Prepared, concurrency: Concurrency, connect: Callable[[str], Client], *, api_key: str | None
) -> Router | MessageModel:
    """Return the source of turns: a router for servers that exchange tokens, or a model for messages."""
    config, name = prepared.config, prepared.known.served_name
    rollout = config.rollout
    if name is not None:
        most = rollout.max_concurrent_trajectories
        return MessageModel(
            prepared.place.urls,
            name,
            api_key=api_key,
            max_connections=most,
            backpressure=concurrency,
            template_kwargs=config.model.chat_template_kwargs,
        )
    vocab_size, context_tokens = model_limits(config.model, prepared.chat)
    return Router(
        connect,
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        max_silence_s=rollout.max_server_silence_s,
        max_pause_s=rollout.weights.timeout_s,
    )


def _as_evaluated(config: Config) -> Config:
    """Return the config with the tools, rewards and lengths of `eval` in place of those of training."""
    lengths = {
        name: value
        for name in ("max_response_tokens", "max_turn_tokens")
        if (value := getattr(config.eval, name)) is not None
    }
    own = config.of_validation
    return own.model_copy(update={"agent": own.agent.model_copy(update=lengths)})
