"""Watchdog findings for an evaluation without progress (agentrl.tracking.watchdog).

Progress is a try that ended.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from agentrl.evaluation.concurrency import Concurrency
from agentrl.evaluation.model_place import Servers
from agentrl.evaluation.play import ProblemPlayer
from agentrl.rollout.sampling import TurnSource
from agentrl.rollout.scopes import PlayLoop
from agentrl.servers.client import SGLangClient
from agentrl.servers.server_loads import ask_loads
from agentrl.tracking.watchdog import ANSWER_S, KEPT_SCOPES, Findings


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
        turns: TurnSource,
        loop: PlayLoop,
        *,
        connect: Callable[[str], SGLangClient] | None,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.stopping = threading.Event()
        self._attempts = attempts
        self._concurrency = concurrency
        self._servers = servers
        self._turns = turns
        self._loop = loop
        self._connect = connect
        self._answer_s = answer_s

    def measure_silence(self, limit_s: float) -> float:
        return self._attempts.silent_s

    def find(self) -> Findings:
        places = self._turns.places()
        asked = Counter(places.values())
        statuses = self._servers.statuses()
        clients = (
            [] if self._connect is None else [self._connect(server.url) for server in statuses if server.url]
        )
        loads = ask_loads(clients, answer_s=self._answer_s, stopping=self.stopping)
        facts = [f"room for {self._concurrency.now} attempts at once", "servers:"]
        for server in statuses:
            state = f"{server.url or 'no address yet'} {server.state}, {server.restarts} restarts"
            load = f"; {loads[server.url]}" if server.url in loads else ""
            facts.append(f"  {state}: {asked[server.url]} turns requested{load}")
        return Findings(
            facts, {"attempts": self._loop.look(self._attempts.scopes, limit=KEPT_SCOPES, places=places)}
        )
