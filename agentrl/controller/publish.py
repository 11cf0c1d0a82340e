"""`Publishing`: decides about publishes. Three layers lie between `Run.publish` and a byte.

Publishing (here)            decides   version, servers, what follows a failure
Publisher (weights/)         sends     pauses servers, moves the weights by a transport, checks, resumes
Learner (learner/)           owns      exports, broadcasts or pickles its weights, on the ranks
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from agentrl.cluster.rollouts import RolloutFleet
from agentrl.cluster.servers import ServerFleet
from agentrl.cluster.workers import Workers
from agentrl.config.rollout import RolloutConfig
from agentrl.controller.observe import Observer
from agentrl.controller.run_dir import RunDir
from agentrl.errors import DiskError, ServerError
from agentrl.learner.learner import Learner
from agentrl.servers.client import SGLangClient, for_each
from agentrl.servers.protocol import POLICY_ADAPTER
from agentrl.tracking.unwritten import reason
from agentrl.types import SamplingParams
from agentrl.weights.publish import Publisher, PublishReport, load_folder

DISK_POLL_S = 1.0
FIRST_TOKEN_TIMEOUT_S = 60.0


class Publishing:
    """Brings the servers of a run to versions of the learner's weights, or of a baseline's.

    version: the current one; -1 before the first publish.

    Args:
        model_path: folder that servers start from.
        newest_version: the newest one that was ever used in this run folder; -1: none.
        disk_patience_s: how long a full disk may refuse the weights.
    """

    def __init__(
        self,
        learner: Workers[Learner],
        rollout: RolloutConfig,
        *,
        model_path: str,
        newest_version: int,
        disk_patience_s: float,
        run_dir: RunDir,
        servers: ServerFleet,
        rollouts: RolloutFleet,
        observer: Observer,
    ) -> None:
        self.version = -1
        self._newest_version = newest_version
        self._rollout = rollout
        self._model_path = model_path
        self._disk_patience_s = disk_patience_s
        self._dir = run_dir
        self._servers = servers
        self._rollouts = rollouts
        self._observer = observer
        self._baseline: str | None = None
        # until the first publish every server needs weights; later only joining ones
        self._has_published = False
        self._adapter = POLICY_ADAPTER if rollout.weights.adapter == "alone" else None
        self._publisher = self._open(learner)

    def _open(self, learner: Workers[Learner]) -> Publisher:
        return Publisher(
            learner,
            self._rollout.weights,
            folder=self._dir.weights(self._rollout.weights),
            pause_mode=lambda url: self._rollout.pause_mode_of(self._servers.kind_of(url)),
            temperature=self._rollout.temperature,
            model=Path(self._model_path),
        )

    def set_learner(self, learner: Workers[Learner]) -> None:
        """Publish from restarted ranks. The servers drop the state that they kept for the old ranks."""
        self._servers.talk(self._servers.urls, self._publisher.transport.abandon)
        self._publisher = self._open(learner)

    @contextmanager
    def baseline(self, folder: str) -> Iterator[None]:
        """Publish the weights in `folder` instead of the learner's within the block."""
        self._baseline = folder
        try:
            yield
        finally:
            self._baseline = None

    def publish(self, what: str, *, step: int) -> None:
        """Bring every server to a new version, which was never used in this run folder.

        what: `policy` or the baseline, for the journal of versions.
        """
        # Set and journaled before any server gets it: a publish that fails half-way uses the version up, too.
        self.version = self._newest_version = self._newest_version + 1
        self._observer.unwritten.attempt(
            "versions.jsonl", partial(self._dir.journal_version, self.version, step=step, what=what)
        )
        self._send(self._servers.urls + self._servers.urls_needing_weights)

    def catch_up(self) -> None:
        """Bring servers that joined or restarted to the current version; remove servers that left from the
        actors.
        """
        behind = self._servers.urls_needing_weights
        if behind:
            self._send(behind)
        elif set(self._servers.urls) != set(self._rollouts.urls):
            self._rollouts.set_servers(self._servers.urls, version=self.version)

    def _send(self, urls: Sequence[str]) -> None:
        """Bring `urls` to the current version. Servers that fail are restarted and need weights again.

        Servers that join or return are verified before they serve, even without `rollout.weights.verify`.
        """
        version, say = self.version, self._observer.say
        joining = [url for url in urls if url in self._servers.urls_needing_weights]
        for url in joining if self._has_published else ():
            what = "was restarted" if self._servers.has_restarted(url) else "joined"
            say(f"server {url} {what} and gets version {version}")
        report = self._send_patiently(urls, must_verify=bool(joining) and self._has_published)
        self._has_published |= self._baseline is None
        self._observer.count_published(report.num_bytes, report.times)
        for url, why in report.repaired.items():
            say(f"server {url} loaded version {version} only at the second attempt: {why}")
        given = [url for url in joining if url not in report.failed]
        failed = {
            **report.failed,
            **self._servers.talk(given, partial(find_unfit, version=version), adapter=self._adapter),
        }
        for url, why in failed.items():
            say(f"server {url} did not load version {version}: {why}; restarting it")
            self._servers.restart(url)
        # The actors learn of the servers last: no traffic reaches one without the current weights.
        self._servers.mark_ready([url for url in urls if url not in failed])
        self._rollouts.set_servers(self._servers.urls, version=version)
        self._rollouts.trace_pauses(report.pauses)
        self._observer.set_servers(self._servers.states)

    def _send_patiently(self, urls: Sequence[str], *, must_verify: bool) -> PublishReport:
        """Send the weights to `urls`, retrying while the disk refuses them.

        Raises:
            DiskError: the disk refused them for longer than `buffer.disk_patience_s`.
        """
        if self._baseline is None:
            send = partial(self._publisher.publish, self.version, must_verify=must_verify)
        else:
            send = partial(
                load_folder, self._baseline, self.version, timeout_s=self._rollout.weights.timeout_s
            )
        deadline = time.monotonic() + self._disk_patience_s
        then = f"the run waits, for at most buffer.disk_patience_s={self._disk_patience_s:g}"
        while True:
            try:
                report = self._servers.talk(urls, send)
            except DiskError as error:
                if time.monotonic() > deadline:
                    raise DiskError(reason(error)) from error
                self._observer.unwritten.count("weights", error, then=then)
                time.sleep(DISK_POLL_S)
            else:
                self._observer.unwritten.clear("weights")
                return report


async def find_unfit(servers: Sequence[SGLangClient], *, version: int) -> dict[str, str]:
    """Return {url: why} of the servers that do not sample a token with `version`, which they were just
    given.
    """

    async def sample(server: SGLangClient) -> None:
        sampled = await server.generate([0], SamplingParams(1), rid=f"join-{uuid.uuid4().hex}")
        if (got := sampled.versions.tolist()) != [version]:
            raise ServerError(f"it received version {version} but sampled a token of version {got}")

    return await for_each(
        servers, sample, timeout_s=FIRST_TOKEN_TIMEOUT_S, limit="the time limit for a first token"
    )
