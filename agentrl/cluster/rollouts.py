"""`RolloutFleet`: starts the rollout actors of a run, sends them servers and versions, replaces dead ones."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa
import ray
from ray import ObjectRef
from ray.exceptions import ObjectLostError, RayError

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.cluster.actors import DEATHS, Actor, ActorKind, get, get_each, translate
from agentrl.cluster.buffer import FileStore
from agentrl.cluster.control import ActorLine
from agentrl.cluster.remote_buffer import RemoteBuffer
from agentrl.cluster.starting import num_done
from agentrl.data.attempt_files import AttemptFiles
from agentrl.data.trajectories import decode, from_ipc
from agentrl.errors import AgentRLError, InfrastructureError
from agentrl.plugins.last_words import keep_last_words, read_file
from agentrl.rollout.frozen_servers import StartedKeys
from agentrl.rollout.garbage import collect_rarely
from agentrl.rollout.limits import server_key
from agentrl.rollout.worker import RolloutSettings, RolloutWorker
from agentrl.servers.front_router import SGLangRouter
from agentrl.servers.server_order import order_for
from agentrl.servers.startup import Readiness
from agentrl.servers.trio_run import in_trio
from agentrl.tracking.attempts import AttemptCounts, FailedAttempt
from agentrl.tracking.spans import Span
from agentrl.types import Lease, Outcome, PluginKind, ServerPause, Trajectory

N = TypeVar("N", int, float)

CALL_TIMEOUT_S = 60.0
ROLLOUT = ActorKind("RolloutActor", "a rollout actor", CALL_TIMEOUT_S, num_threads=8)
START_TIMEOUT_S = 600.0
"""Loading tokenizer and plugins takes seconds, or longer on a small machine where all parts start at once."""
GAUGES = frozenset(
    {"in_flight", "generations_in_flight", "servers_up", "outstanding_tokens", "stuck_threads", "boxes_open"}
)
"""Names in `RolloutWorker.stats` that are about the present moment. All others only grow."""


OUTCOME_OF_KIND: Mapping[PluginKind, Outcome] = {
    "agent": Outcome.ABORTED,
    "tool": Outcome.TOOL_ERROR,
    "interaction": Outcome.TOOL_ERROR,
    "environment": Outcome.ENVIRONMENT_ERROR,
    "reward": Outcome.REWARD_ERROR,
}
"""How an attempt failed whose plugin ended the process."""


def rollout_worker(
    owner: str, settings: RolloutSettings, buffer: Actor[ReplayBuffer] | None, files: AttemptFiles
) -> RolloutWorker:
    """Return the worker, in its process.

    It leases as `owner` and stores what it played in `files`; `buffer` None: only `play` can be used.
    """
    # Arrow's own pool keeps, for each thread, what that thread has freed.
    pa.set_memory_pool(pa.system_memory_pool())
    if buffer is not None:
        files.check_shared()
    with suppress(OSError):  # a full disk: its end would only have less to say
        words = files.last_words_of(owner)
        words.parent.mkdir(parents=True, exist_ok=True)
        keep_last_words(words.open("wb+"))
    remote = None if buffer is None else RemoteBuffer(owner, buffer, FileStore(files, buffer.retry))
    worker = RolloutWorker(settings, remote)
    collect_rarely()
    return worker


@dataclass
class _Member:
    """One incarnation of a rollout actor.

    `owner` is unique per incarnation, so a dead actor's leases are found.
    """

    owner: str
    actor: Actor[RolloutWorker]
    running: ObjectRef | None = None
    counts: AttemptCounts = field(default_factory=AttemptCounts)  # its last report
    position: int = 0  # how many of its failures were already read
    num_warnings: int = 0  # so many of its warnings were already read
    stats: Mapping[str, float] = field(default_factory=dict)  # its last report
    restarts: int = 0  # of its place
    is_silent: bool = False  # it did not answer when its report was last asked for

    @property
    def line(self) -> ActorLine:
        state = "starting" if self.running is None else "silent" if self.is_silent else "playing"
        in_flight, finished = (int(self.stats.get(name, 0)) for name in ("in_flight", "finished"))
        return ActorLine(self.owner, state, self.restarts, in_flight, finished)


class RolloutFleet:
    """All rollout actors of a run. The constructor launches them; `wait_until_ready` waits for them.

    `key_of` returns the API key of the server at a URL.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        buffer: Actor[ReplayBuffer],
        files: AttemptFiles,
        *,
        key_of: Callable[[str], str | None],
    ) -> None:
        self._settings = settings
        self._buffer = buffer
        self._files = files
        self._key_of = key_of
        self._restarts_left = settings.rollout.max_actor_restarts * settings.rollout.num_actors
        self._keys: dict[str, str | None] = {}  # URL -> API key of the servers that the actors use
        self._version = -1
        self._frozen: StartedKeys = {}
        front_url = settings.rollout.front_url
        self._router = (
            None
            if front_url is None
            else SGLangRouter(front_url, api_key=server_key(settings.rollout.api_key_env))
        )
        self._is_running = False
        self._attempts = AttemptCounts()
        self._ended: list[FailedAttempt] = []  # by a plugin, with their process
        self._warned: set[str] = set()  # what actors warned of and was said
        self._gone: dict[str, float] = {}  # counters of replaced actors, by their last reports
        self._members = [self._new_member(index) for index in range(settings.rollout.num_actors)]
        self._starting = [member.actor.begin(RolloutWorker.stats) for member in self._members]
        self._deadline = time.monotonic() + START_TIMEOUT_S

    @property
    def starting(self) -> Mapping[ObjectRef, float]:
        """The actors that are still starting, each with its deadline (monotonic clock, in seconds)."""
        return dict.fromkeys(self._starting, self._deadline)

    @property
    def readiness(self) -> Readiness:
        return Readiness(
            "rollout actors",
            len(self._members) - len(self._starting) + num_done(self._starting),
            len(self._members),
        )

    @property
    def actors(self) -> dict[str, Actor[RolloutWorker]]:
        """The actors by owner, the name in their leases.

        Other threads may read it: it copies the list first.
        """
        return {member.owner: member.actor for member in list(self._members)}

    def wait_until_ready(self) -> None:
        """Wait until every actor has its tokenizer and plugins.

        Raises:
            UserError: the tokenizer or a plugin is missing or wrong.
            InfrastructureError: an actor died, or did not start in time.
        """
        get(self._starting, timeout_s=max(0.0, self._deadline - time.monotonic()), who="a rollout actor")
        self._starting = []

    def _new_member(self, index: int) -> _Member:
        owner = f"rollout-{index}-{uuid.uuid4().hex[:8]}"
        kind = replace(ROLLOUT, who=owner)
        options = {"scheduling_strategy": "SPREAD"}
        actor = kind.launch(options, rollout_worker, owner, self._settings, self._buffer, self._files)
        return _Member(owner, actor)

    @property
    def lines(self) -> list[ActorLine]:
        """All actors by their last reports; no actor is asked."""
        return [member.line for member in self._members]

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers that the actors use."""
        return tuple(self._keys)

    def set_servers(self, urls: Sequence[str], *, version: int) -> None:
        """Send all actors their servers and the minimum version that a server must have.

        A router in front of the servers (`rollout.front_url`) is updated first.

        Raises:
            ConfigError: the router in front has servers of somebody else.
            ServerError: the router does not answer, or refuses a server of this run.
        """
        keys = {url: self._key_of(url) for url in urls}
        if self._router is not None and urls:
            in_trio(self._router.set_servers, keys)
        self._keys, self._version = keys, version
        self._ask(  # heal() replaces a dead actor and sends its servers then
            lambda index, actor: actor.begin(RolloutWorker.set_servers, self._keys_for(index), version)
        )

    def set_frozen_servers(self, started: StartedKeys) -> None:
        """Send all actors the servers that the run started for frozen models, if they changed."""
        if started == self._frozen:
            return
        self._frozen = started
        self._ask(lambda _, actor: actor.begin(RolloutWorker.set_frozen_servers, started))

    def _keys_for(self, index: int) -> dict[str, str | None]:
        """Return the servers in the order in which this actor fills them."""
        return {url: self._keys[url] for url in order_for(self._keys, index, len(self._members))}

    def run(self) -> None:
        """Start playing training tasks."""
        self._is_running = True
        for member in self._members:
            member.running = member.actor.begin(RolloutWorker.run)

    def heal(self, say: Callable[[str], None]) -> int:
        """Replace the actors that died and return their leases to the buffer; return how many died.

        Raises:
            InfrastructureError: an actor raised (a bug or a broken plugin), or the restarts are used up.
        """
        dead = [index for index, member in enumerate(self._members) if self._is_dead(member)]
        for index in dead:
            self._replace(index, say)
        return len(dead)

    def _is_dead(self, member: _Member) -> bool:
        if member.running is None:
            return False
        done, _ = ray.wait([member.running], timeout=0)
        if not done:
            return False
        try:
            ray.get(member.running, timeout=CALL_TIMEOUT_S)
        except DEATHS:
            return True
        except RayError as error:
            raise translate(error, who=f"rollout actor {member.owner}", timeout_s=CALL_TIMEOUT_S) from error
        raise InfrastructureError(f"rollout actor {member.owner} exited unexpectedly")

    def _replace(self, index: int, say: Callable[[str], None]) -> None:
        old = self._members[index]
        why = self._read_last_words(old.owner)
        if self._restarts_left == 0:
            raise InfrastructureError(
                f"rollout actor {old.owner} died{why} and rollout.max_actor_restarts is used up"
            )
        self._restarts_left -= 1
        # an unreachable actor may still play; its leases are free only after it is killed
        old.actor.kill()
        released = self._buffer.run(ReplayBuffer.release, old.owner)
        new = self._new_member(index)
        with suppress(InfrastructureError):  # it died while starting: the next heal() replaces it
            new.actor.within(CALL_TIMEOUT_S * 3).run(
                RolloutWorker.set_servers, self._keys_for(index), self._version
            )
            new.actor.within(CALL_TIMEOUT_S * 3).run(RolloutWorker.set_frozen_servers, self._frozen)
        if self._is_running:
            new.running = new.actor.begin(RolloutWorker.run)
        new.restarts = old.restarts + 1
        _add(_counters(old.stats), self._gone)
        self._members[index] = new
        say(
            f"rollout actor {old.owner} died{why}; {released} groups are leased again and {new.owner} takes "
            "over"
        )

    def _read_last_words(self, owner: str) -> str:
        """Return in brackets which plugin ended an actor's process, and count its attempt as failed; "" if no
        plugin did.
        """
        path = self._files.last_words_of(owner)
        words = read_file(path)
        path.unlink(missing_ok=True)
        if words is None:
            return ""
        failure, attempt = words.failure, words.attempt
        if failure.plugin is not None and attempt is not None:
            outcome = OUTCOME_OF_KIND[failure.plugin.kind]
            self._attempts += AttemptCounts(
                Counter([outcome]), Counter([failure.plugin]), Counter([failure.plugin])
            )
            self._ended.append(
                FailedAttempt(
                    failure,
                    outcome,
                    "retried",
                    attempt.task_id,
                    attempt.data_source,
                    attempt.agent_name,
                    attempt.group_id,
                    attempt.member,
                    self._version,
                    time.time(),
                )
            )
        return f" ({words.line})"

    def start_play(self, leases: Sequence[Lease]) -> dict[ObjectRef, list[Lease]]:
        """Start playing `leases` for validation, spread over the actors.

        Returns the leases behind each pending result; `collect` reads a result.
        """
        shares = [list(leases[i :: len(self._members)]) for i in range(len(self._members))]
        return {
            m.actor.begin(RolloutWorker.play, share): share
            for m, share in zip(self._members, shares, strict=True)
            if share
        }

    @staticmethod
    def collect(result: ObjectRef) -> list[Trajectory] | None:
        """Return the trajectories of a finished result; None if the actor died.

        Raises:
            AgentRLError: the actor raised an error.
        """
        try:
            played: bytes = ray.get(result, timeout=CALL_TIMEOUT_S)
        except (*DEATHS, ObjectLostError):  # the actor died, or its node with the stored result
            return None
        except RayError as error:
            raise translate(error, who="a rollout actor", timeout_s=CALL_TIMEOUT_S) from error
        return decode(from_ipc(played))

    def stats(self) -> dict[str, float]:
        """Return the sums of all actors' counters (see `RolloutManager.stats`), replaced actors included.

        An actor that does not answer counts with its last report, and without it in gauges.
        """
        total = dict(self._gone)
        answers = self._ask(lambda _, actor: actor.begin(RolloutWorker.stats))
        for member, stats in zip(self._members, answers, strict=True):
            member.is_silent = stats is None
            if stats is None:
                _add(_counters(member.stats), total)
            else:
                member.stats = stats
                _add(stats, total)
        return total

    def attempts(self, say: Callable[[str], None]) -> tuple[AttemptCounts, list[FailedAttempt]]:
        """Return counts of how training attempts ended, and the failures since the last call. What the actors
        warned of since then goes to `say`, once if several say the same.

        The counts cover the whole run, replaced actors included.
        """
        failed, self._ended = self._ended, []
        reports = self._ask(
            lambda index, actor: actor.begin(
                RolloutWorker.attempts, self._members[index].position, self._members[index].num_warnings
            )
        )
        for member, report in zip(self._members, reports, strict=True):
            if report is None:  # `position` stays, so the next call asks for the same failures
                continue
            self._attempts += report.counts - member.counts
            member.counts, member.position = report.counts, report.position
            failed += report.failed
            member.num_warnings += len(report.warnings)
            for warning in set(report.warnings) - self._warned:
                say(f"rollout actor {member.owner}: {warning}")
            self._warned.update(report.warnings)
        return self._attempts, failed

    def trace_pauses(self, pauses: Sequence[ServerPause]) -> None:
        """Tell all actors which servers were paused, if attempts have traces."""
        if pauses and self._settings.spans.endpoint is not None:
            self._ask(lambda _, actor: actor.begin(RolloutWorker.trace_pauses, pauses))

    def trace(self, spans: Sequence[Span]) -> None:
        """Send spans of the controller to the collector, through the first actor that takes them."""
        if self._settings.spans.endpoint is not None:
            self._members[0].actor.begin(RolloutWorker.trace, spans)

    def span_problem(self) -> str:
        """Return why a collector did not take spans of an actor; "" if none says so."""
        answers = self._ask(lambda _, actor: actor.begin(RolloutWorker.span_problem))
        return next((problem for problem in answers if problem), "")

    def outstanding_tokens(self) -> dict[str, int]:
        """Return the tokens of requests in flight by server URL, summed over the actors that answer."""
        total: dict[str, int] = {}
        for tokens in self._ask(lambda _, actor: actor.begin(RolloutWorker.outstanding_tokens)):
            _add(tokens or {}, total)
        return total

    def _ask(self, begin: Callable[[int, Actor[RolloutWorker]], ObjectRef]) -> list[Any]:
        """Begin a call to every actor, and return the results in their order, within one deadline for all.

        None for an actor that died or did not answer.

        Raises:
            AgentRLError: an actor raised it.
        """
        refs = [begin(index, member.actor) for index, member in enumerate(self._members)]
        who = [member.owner for member in self._members]
        return get_each(refs, timeout_s=CALL_TIMEOUT_S, who=who)

    def close(self) -> None:
        """Stop playing and end the actors.

        Actors that are still starting are killed without a stop: they play nothing.
        """
        if self._router is not None:
            with suppress(AgentRLError):  # the router may be gone
                in_trio(self._router.remove_servers)
        with suppress(AgentRLError):
            if not self._starting:
                get(
                    [m.actor.begin(RolloutWorker.stop) for m in self._members],
                    timeout_s=CALL_TIMEOUT_S,
                    who="a rollout actor",
                )
        for member in self._members:
            member.actor.kill()
            self._files.last_words_of(member.owner).unlink(missing_ok=True)


def _counters(stats: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in stats.items() if name not in GAUGES}


def _add(values: Mapping[str, N], total: dict[str, N]) -> None:
    for name, value in values.items():
        total[name] = total[name] + value if name in total else value
