"""`Publishing`: brings the servers of a run to a version of the weights, and restarts those that fail."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.controller.learner import LearnerWeights
from agentrl.controller.observe import Observer
from agentrl.controller.run_dir import RunDir
from agentrl.errors import DiskError
from agentrl.fleet.joining import find_unfit
from agentrl.fleet.rollouts import RolloutFleet
from agentrl.fleet.servers import ServerFleet
from agentrl.learner.learner import Learner
from agentrl.rollout.trio_run import in_trio
from agentrl.sglang.protocol import POLICY_ADAPTER
from agentrl.weights.publish import Publisher, PublishReport, load_folder
from agentrl.workers.workers import Workers

DISK_POLL_S = 1.0


class Publishing:
    """Publishes the weights of a learner, or of a baseline."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        learner: Workers[Learner],
        *,
        servers: ServerFleet,
        rollouts: RolloutFleet,
        observer: Observer,
    ) -> None:
        self._config = config
        self._dir = run_dir
        self._servers = servers
        self._rollouts = rollouts
        self._observer = observer
        self._baseline: str | None = None
        # until the first publish every server needs weights; later only joining ones
        self._has_published = False
        self._adapter = POLICY_ADAPTER if config.rollout.weights.adapter == "alone" else None
        self._publisher = self._open(learner)

    def _open(self, learner: Workers[Learner]) -> Publisher:
        rollout = self._config.rollout
        backend = rollout.weights.backend
        return Publisher(
            LearnerWeights(learner),
            rollout.weights,
            folder=self._dir.weights(rollout.weights),
            pause_mode=lambda url: rollout.pause_mode_of(self._servers.kind_of(url)),
            backend=backend if backend != "auto" else learner.run(Learner.collective_backend),
            temperature=rollout.temperature,
            model=Path(self._config.model.path),
        )

    def set_learner(self, learner: Workers[Learner]) -> None:
        """Publish from restarted ranks. The servers drop the state that they kept for the old ranks."""
        in_trio(self._leave, self._publisher)
        self._publisher = self._open(learner)

    async def _leave(self, publisher: Publisher) -> None:
        clients = self._servers.clients(self._servers.urls)
        try:
            await publisher.abandon(clients)
        finally:
            for client in clients:
                await client.aclose()

    @contextmanager
    def instead(self, folder: str) -> Iterator[None]:
        """Publish the weights in `folder` instead of the learner's within the block."""
        self._baseline = folder
        try:
            yield
        finally:
            self._baseline = None

    def new_version(self, what: str, *, step: int, after: int) -> int:
        """Return a version above `after` that was never used in this run folder, and journal it."""
        version = max(self._dir.next_version(), after + 1)
        self._observer.unwritten.attempt("versions.jsonl", partial(self._dir.journal_version, version, step=step, what=what))
        return version

    def send(self, urls: Sequence[str], version: int) -> None:
        """Bring `urls` to `version`. Servers that fail are restarted and need weights again.

        Servers that join or return are verified before they serve, even without `rollout.weights.verify`.
        """
        joining = [url for url in urls if url in self._servers.urls_needing_weights]
        for url in joining if self._has_published else ():
            what = "was restarted" if self._servers.has_restarted(url) else "joined"
            self._observer.say(f"server {url} {what} and gets version {version}")
        report = self._publish_patiently(urls, version, must_verify=bool(joining) and self._has_published)
        self._has_published |= self._baseline is None
        self._observer.count_published(report.num_bytes, report.times)
        for url, why in report.repaired.items():
            self._observer.say(f"server {url} took version {version} at the second attempt: {why}")
        given = self._servers.clients([url for url in joining if url not in report.failed], adapter=self._adapter)
        failed = {**report.failed, **in_trio(find_unfit, given, version)}
        for url, why in failed.items():
            self._observer.say(f"server {url} did not take version {version}: {why}; it is restarted")
            self._servers.restart(url)
        # The actors learn of the servers last: no traffic reaches one without the current weights.
        self._servers.mark_ready([url for url in urls if url not in failed])
        self._rollouts.set_servers(self._servers.urls, version=version)
        self._observer.set_servers(self._servers.states)

    def _publish_patiently(self, urls: Sequence[str], version: int, *, must_verify: bool) -> PublishReport:
        """Bring `urls` to `version`, retrying while the disk refuses the weights.

        Raises:
            DiskError: the disk refused them for longer than `buffer.disk_patience_s`.
        """
        deadline = time.monotonic() + self._config.buffer.disk_patience_s
        while True:
            try:
                report = in_trio(self._publish, urls, version, must_verify)
            except DiskError as error:
                if time.monotonic() > deadline:
                    raise
                self._observer.unwritten.count("weights", error)
                time.sleep(DISK_POLL_S)
            else:
                self._observer.unwritten.clear("weights")
                return report

    async def _publish(self, urls: Sequence[str], version: int, must_verify: bool) -> PublishReport:
        clients = self._servers.clients(urls)
        try:
            if self._baseline is not None:
                return await load_folder(self._baseline, version, clients, timeout_s=self._config.rollout.weights.timeout_s)
            return await self._publisher.publish(version, clients, must_verify=must_verify)
        finally:
            for client in clients:
                await client.aclose()
