"""Transport `disk`: weights are written into a folder that all servers read; so is a LoRA adapter that travels alone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.config.rollout import WeightsConfig
from agentrl.errors import RequestRefused
from agentrl.sglang.client import SGLangClient
from agentrl.sglang.protocol import POLICY_ADAPTER
from agentrl.weights.attempt import Hold, LearnerCalls, Sent, for_each

_LIMIT = "rollout.weights.timeout_s"


class FolderTransport:
    """Whole models. A folder is written before anything pauses, so that servers stand still only while they read it."""

    def __init__(self, learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> None:
        self._learner = learner
        self._config = config
        self._folder = folder

    async def prepare(self, version: int) -> None:
        await self._learner.call(self._learner.source.export, str(version_folder(self._folder, version)))
        keep_newest(self._folder, keep=2)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        folder = version_folder(self._folder, version)
        specs = await self._learner.call(self._learner.source.tensor_specs)

        async def load(server: SGLangClient) -> None:
            async with hold(server) as may_flush:
                await server.update_weights_from_disk(str(folder), version=version, flush_cache=may_flush)

        failed = await for_each(servers, load, timeout_s=self._config.timeout_s, limit=_LIMIT)
        return Sent(sum(spec.num_bytes for spec in specs) * len(servers), failed)

    async def close(self, servers: Sequence[SGLangClient] = ()) -> None:
        """Keep the folders: a server may be reading one."""


class AdapterTransport:
    """The adapter of a version in the place of the last one; the base weights stay as the servers were started with."""

    def __init__(self, learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> None:
        self._learner = learner
        self._config = config
        self._folder = folder

    async def prepare(self, version: int) -> None:
        await self._learner.call(self._learner.source.export_adapter, str(version_folder(self._folder, version)))
        keep_newest(self._folder, keep=2)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        folder = version_folder(self._folder, version)
        specs = await self._learner.call(self._learner.source.adapter_specs)

        async def load(server: SGLangClient) -> None:
            async with hold(server):
                with suppress(RequestRefused):  # it has none before its first publish
                    await server.unload_adapter(POLICY_ADAPTER)
                await server.load_adapter(POLICY_ADAPTER, str(folder))
                await server.update_weight_version(version)

        failed = await for_each(servers, load, timeout_s=self._config.timeout_s, limit=_LIMIT)
        return Sent(sum(spec.num_bytes for spec in specs) * len(servers), failed)

    async def close(self, servers: Sequence[SGLangClient] = ()) -> None:
        """Keep the folders: a server may be reading one."""


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"v{version:06d}"


def keep_newest(folder: Path, *, keep: int) -> None:
    """Remove all but the newest exported versions; a server may still be reading the one before the last."""
    for old in sorted(folder.glob("v*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
