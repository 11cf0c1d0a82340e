"""Transport `disk`: weights are written into a folder that all servers read; also for a lone LoRA adapter."""

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
    """Whole models. The folder is written before any server pauses, so a pause covers only the reading."""

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
        """Keep the folders: a server may still be reading one."""


class AdapterTransport:
    """Replaces the adapter of the previous version; the base weights stay as loaded at the servers' start."""

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
                with suppress(RequestRefused):  # no adapter is loaded before the first publish
                    await server.unload_adapter(POLICY_ADAPTER)
                await server.load_adapter(POLICY_ADAPTER, str(folder))
                await server.update_weight_version(version)

        failed = await for_each(servers, load, timeout_s=self._config.timeout_s, limit=_LIMIT)
        return Sent(sum(spec.num_bytes for spec in specs) * len(servers), failed)

    async def close(self, servers: Sequence[SGLangClient] = ()) -> None:
        """Keep the folders: a server may still be reading one."""


def version_folder(folder: Path, version: int) -> Path:
    """Return the folder of one version; names sort by version."""
    return folder / f"v{version:06d}"


def keep_newest(folder: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` exported versions; a server may still be reading the previous one."""
    for old in sorted(folder.glob("v*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
