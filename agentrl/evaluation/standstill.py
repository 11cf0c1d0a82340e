"""Watchdog findings for an evaluation without progress (agentrl.tracking.watchdog).

Progress is a try that ended.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.evaluation.concurrency import Concurrency
from agentrl.evaluation.model_place import Servers
from agentrl.evaluation.play import ProblemPlayer
from agentrl.rollout.play_loop import PlayLoop
from agentrl.rollout.scopes import LiveScopes
from agentrl.rollout.server_loads import ask_loads
from agentrl.serving.health import ServerStatus
from agentrl.sglang.client import SGLangClient
from agentrl.tracking.watchdog import ANSWER_S, KEPT_SCOPES


class Places(Protocol):
    """Knows which server each requested turn waits for: `agentrl.rollout.router.Router`."""

    def places(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class EvaluationFindings:
    """State of the evaluation.

    Attributes:
        room: limit on concurrent attempts.
        statuses: of all servers.
        loads: by URL, of servers that report their load.
        places: attempt -> URL of the server that its turn waits for.
        scopes: what currently runs.
    """

    room: int
    statuses: Sequence[ServerStatus]
    loads: Mapping[str, str]
    places: Mapping[str, str]
    scopes: LiveScopes

    def lines(self, *, max_scopes: int | None = None) -> Iterator[str]:
        """Yield the findings as text.

        `max_scopes`: number of attempts shown in full; None: all, with trio's own task tree.
        """
        yield f"room for {self.room} attempts at once"
        yield "servers:"
        asked = Counter(self.places.values())
        for server in self.statuses:
            load = f"; {self.loads[server.url]}" if server.url in self.loads else ""
            state = f"{server.url or 'no address yet'} {server.state}, {server.restarts} restarts"
            yield f"  {state}: {asked[server.url]} turns asked for{load}"
        yield "attempts:"
        yield from (f"  {line}" for line in (self.scopes if max_scopes is None else self.scopes.shortened(max_scopes)).lines())


class WatchedEvaluation:
    """A running evaluation, in the form that a watchdog observes.

    Args:
        connect: opens a client that can ask a server for its load; None: the servers do not report a load.
        answer_s: timeout of each server's answer, in seconds.
    """

    key = "eval.watchdog_s"
    progress = "try of an attempt that ended"

    def __init__(
        self,
        attempts: ProblemPlayer,
        concurrency: Concurrency,
        servers: Servers,
        model: Places,
        loop: PlayLoop,
        *,
        connect: Callable[[str], SGLangClient] | None,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.stopping = threading.Event()
        self._attempts = attempts
        self._concurrency = concurrency
        self._servers = servers
        self._model = model
        self._loop = loop
        self._connect = connect
        self._answer_s = answer_s

    def measure_silence(self, limit_s: float) -> float:
        return self._attempts.silent_s

    def find(self) -> EvaluationFindings:
        places = self._model.places()
        scopes = self._loop.look(self._attempts.scopes, limit=KEPT_SCOPES, places=places)
        statuses = self._servers.statuses()
        clients = [] if self._connect is None else [self._connect(server.url) for server in statuses if server.url]
        loads = ask_loads(clients, answer_s=self._answer_s, stopping=self.stopping)
        return EvaluationFindings(self._concurrency.now, statuses, loads, places, scopes)
