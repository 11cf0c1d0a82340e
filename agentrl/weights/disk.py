"""Transport `disk`: weights are written into a folder that all servers read.

Whole models, a lone LoRA adapter, or with `rollout.weights.delta` only what an update changed. The learner
writes before any server pauses, so a pause covers only the reading.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.config.rollout import WeightsConfig
from agentrl.errors import RequestRefused
from agentrl.learner.learner import Learner
from agentrl.sglang.client import SGLangClient
from agentrl.sglang.protocol import POLICY_ADAPTER
from agentrl.sglang.weight_changes import CHANGES_FORMAT
from agentrl.weights.transport import Hold, LearnerCalls, Sent, Transport, sum_bytes


class FolderTransport(Transport):
    """Whole models. The folders of the two newest versions are kept: a server may still be reading one."""

    def __init__(self, learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> None:
        super().__init__(learner, config)
        self._folder = folder

    async def prepare(self, version: int) -> None:
        await self._learner.run(Learner.export, str(self._folder_of(version)))
        self._keep_newest(2)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        folder = self._folder_of(version)
        size = sum_bytes(await self._tensor_specs())

        async def load(server: SGLangClient) -> None:
            async with hold(server) as may_flush:
                await server.update_weights_from_disk(str(folder), version=version, flush_cache=may_flush)

        return Sent(size * len(servers), await self._try_each(servers, load, num_bytes=size))

    def _folder_of(self, version: int) -> Path:
        return self._folder / f"v{version:06d}"  # names sort by version

    def _keep_newest(self, num_versions: int) -> None:
        for old in sorted(self._folder.glob("v*"))[:-num_versions]:
            shutil.rmtree(old, ignore_errors=True)


class AdapterTransport(FolderTransport):
    """Replaces the adapter of the previous version; the base weights stay as loaded at the servers' start."""

    async def prepare(self, version: int) -> None:
        await self._learner.run(Learner.export_adapter, str(self._folder_of(version)))
        self._keep_newest(2)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        folder = self._folder_of(version)
        size = sum_bytes(await self._learner.run(Learner.adapter_specs))

        async def load(server: SGLangClient) -> None:
            async with hold(server):
                with suppress(RequestRefused):  # no adapter is loaded before the first publish
                    await server.unload_adapter(POLICY_ADAPTER)
                await server.load_adapter(POLICY_ADAPTER, str(folder))
                await server.update_weight_version(version)

        return Sent(size * len(servers), await self._try_each(servers, load, num_bytes=size))


class ChangesTransport(FolderTransport):
    """Only what an update changed. Remembers the version of each server; writes all weights only on demand.

    The embedded server reads the changed elements. It rejects them by a checksum if it has other base
    weights. SGLang reads the changed tensors as a whole, because its loaders support nothing finer. It cannot
    reject them, so its version is checked first. A server without the previous version (restarted, new, or
    after a failed update) gets all weights.
    """

    def __init__(self, learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> None:
        super().__init__(learner, config, folder=folder)
        self._version: int | None = None  # the last version written
        # The version that the changes of `_version` apply to; None: they were not written.
        self._base: int | None = None
        self._holds: dict[str, int] = {}  # url -> version
        self._sizes = (0, 0)  # bytes of the changed elements, and of the changed tensors
        self._is_whole_written = False

    async def prepare(self, version: int) -> None:
        if version == self._version:  # published again, for servers that missed the first attempt
            return
        folder = self._folder_of(version)
        if self._version is None:
            await self._learner.run(Learner.write_base, str(folder / "whole"), False)
            self._base, self._is_whole_written = None, True
        else:
            self._sizes = await self._learner.run(Learner.write_changes, str(folder / "changes"))
            self._base, self._is_whole_written = self._version, False
        self._version = version
        self._keep_newest(2)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        folder = self._folder_of(version)
        changes, whole = folder / "changes", folder / "whole"
        sizes: dict[str, int] = {}  # url -> bytes that the server read
        without_base: list[SGLangClient] = []

        async def load_changes(server: SGLangClient) -> None:
            # Forgotten until the update succeeds: a failed one may leave any weights.
            held = self._holds.pop(server.url, None)
            if held is None or held != self._base or (await server.model_info()).version != self._base:
                without_base.append(server)
                return
            knows_elements = (await server.server_info()).get("knows_changes") is True
            path, load_format = (changes, CHANGES_FORMAT) if knows_elements else (changes / "tensors", "auto")
            async with hold(server) as may_flush:
                try:
                    await server.update_weights_from_disk(
                        str(path), version=version, flush_cache=may_flush, load_format=load_format
                    )
                except RequestRefused:  # its weights are not the expected base
                    without_base.append(server)
                    raise  # it stays paused until it has all weights
            sizes[server.url] = self._sizes[0 if knows_elements else 1]

        async def load_whole(server: SGLangClient) -> None:
            async with hold(server) as may_flush:
                await server.update_weights_from_disk(str(whole), version=version, flush_cache=may_flush)
            sizes[server.url] = sum(file.stat().st_size for file in whole.glob("*.safetensors"))

        failed = await self._try_each(servers, load_changes, num_bytes=max(self._sizes))
        if without_base:
            # Written in between, so that no server's deadline runs while the learner writes.
            if not self._is_whole_written:
                await self._learner.run(Learner.write_base, str(whole), True)
                self._is_whole_written = True
            refused = {server.url for server in without_base}
            failed = {url: why for url, why in failed.items() if url not in refused}
            num_bytes = sum_bytes(await self._tensor_specs())
            failed |= await self._try_each(without_base, load_whole, num_bytes=num_bytes)
        self._holds |= dict.fromkeys((server.url for server in servers if server.url not in failed), version)
        return Sent(sum(sizes.values()), failed)
