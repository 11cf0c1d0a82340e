"""Transport `disk` with `rollout.weights.delta`: only what an update changed is written and read.

The embedded server reads the changed elements. It rejects them by a checksum if it has other base weights.
SGLang reads the changed tensors as a whole, because its loaders support nothing finer. It cannot reject them,
so its version is checked first. A server without the previous version (restarted, new, or after a failed
update) gets all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import trio

from agentrl.config.rollout import WeightsConfig
from agentrl.errors import RequestRefused
from agentrl.sglang.client import SGLangClient
from agentrl.sglang.weight_changes import CHANGES_FORMAT
from agentrl.weights.attempt import Hold, LearnerCalls, Sent, for_each
from agentrl.weights.folder import keep_newest, version_folder


class ChangesTransport:
    """Remembers the version of each server, and writes all weights only if a server needs them."""

    def __init__(self, learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> None:
        self._learner = learner
        self._config = config
        self._folder = folder
        self._version: int | None = None  # the last version written
        self._base: int | None = None  # version that the changes of `_version` apply to; None: they were not written
        self._holds: dict[str, int] = {}  # url -> version
        self._sizes = (0, 0)  # bytes of the changed elements, and of the changed tensors
        self._is_whole_written = False
        self._writing = trio.Lock()

    async def prepare(self, version: int) -> None:
        folder, source = version_folder(self._folder, version), self._learner.source
        if version == self._version:  # a second publish of the same version, for servers that missed the first
            return
        if self._version is None:
            await self._learner.call(source.write_base, str(folder / "whole"), False)
            self._base, self._is_whole_written = None, True
        else:
            self._sizes = await self._learner.call(source.write_changes, str(folder / "changes"))
            self._base, self._is_whole_written = self._version, False
        self._version = version
        keep_newest(self._folder, keep=2)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        num_bytes = 0

        async def load(server: SGLangClient) -> None:
            nonlocal num_bytes
            # Forgotten until the update succeeds: a failed one may leave any weights.
            held = self._holds.pop(server.url, None)
            num_bytes += await self._load(server, version, hold, has_base=held is not None and held == self._base)
            self._holds[server.url] = version

        failed = await for_each(servers, load, timeout_s=self._config.timeout_s, limit="rollout.weights.timeout_s")
        return Sent(num_bytes, failed)

    async def close(self, servers: Sequence[SGLangClient] = ()) -> None:
        """Keep the folders: a server may still be reading one."""

    async def _load(self, server: SGLangClient, version: int, hold: Hold, *, has_base: bool) -> int:
        """Bring one server to `version`; return the bytes it had to read."""
        folder = version_folder(self._folder, version)
        if has_base and (await server.model_info()).version == self._base:
            knows_elements = (await server.server_info()).get("knows_changes") is True
            path, load_format = (folder / "changes", CHANGES_FORMAT) if knows_elements else (folder / "changes" / "tensors", "auto")
            async with hold(server) as may_flush:
                try:
                    await server.update_weights_from_disk(str(path), version=version, flush_cache=may_flush, load_format=load_format)
                    return self._sizes[0 if knows_elements else 1]
                except RequestRefused:  # its weights are not the expected base
                    return await self._load_whole(server, version, may_flush=may_flush)
        await self._write_whole(folder)
        async with hold(server) as may_flush:
            return await self._load_whole(server, version, may_flush=may_flush)

    async def _load_whole(self, server: SGLangClient, version: int, *, may_flush: bool) -> int:
        folder = version_folder(self._folder, version)
        await self._write_whole(folder)
        await server.update_weights_from_disk(str(folder / "whole"), version=version, flush_cache=may_flush)
        return sum(file.stat().st_size for file in (folder / "whole").glob("*.safetensors"))

    async def _write_whole(self, folder: Path) -> None:
        # Several servers may need the whole weights at once; only the first writes them.
        async with self._writing:
            if not self._is_whole_written:
                await self._learner.call(self._learner.source.write_base, str(folder / "whole"), True)
                self._is_whole_written = True
