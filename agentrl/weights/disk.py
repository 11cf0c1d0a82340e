"""Transport `disk`: weights are written into a folder that all servers read.

Whole models, a lone LoRA adapter, or with `rollout.weights.delta` only what an update changed. The learner
writes before any server pauses, so a pause covers only the reading.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentrl.config.rollout import WeightsConfig
from agentrl.errors import RequestRefused
from agentrl.learner.learner import Learner
from agentrl.learner.weights import adapter_folder
from agentrl.servers.client import SGLangClient, for_each
from agentrl.servers.process_group import pickle_text
from agentrl.servers.protocol import parse_setting
from agentrl.servers.weight_changes import CHANGES_FILE, CHANGES_FORMAT, CHANGES_LOADER
from agentrl.weights.transport import PING_S, Hold, LearnerCalls, Sent, Transport, sum_bytes


def open_disk(learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> Transport:
    """Return the transport of whole models, of adapters alone, or of changes, as `config` says."""
    if config.adapter == "alone":
        return AdapterTransport(learner, config, folder=folder)
    if config.delta:
        return ChangesTransport(learner, config, folder=folder)
    return FolderTransport(learner, config, folder=folder)


class FolderTransport(Transport):
    """Whole models. The folders of the two newest versions are kept: a server may still be reading one."""

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
        for old in sorted(self._folder.glob(_VERSION))[:-num_versions]:
            shutil.rmtree(old, ignore_errors=True)


class AdapterTransport(FolderTransport):
    """Replaces the adapters of the previous version, that of the policy and those of roles; the base weights
    stay as loaded at the servers' start.
    """

    async def prepare(self, version: int) -> None:
        await self._learner.run(Learner.export_adapter, str(self._folder_of(version)))
        self._keep_newest(2)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        folder = self._folder_of(version)
        size = sum_bytes(await self._learner.run(Learner.adapter_specs))
        names = await self._learner.run(Learner.adapter_names)

        async def load(server: SGLangClient) -> None:
            async with hold(server):
                for name in names:
                    with suppress(RequestRefused):  # no adapter is loaded before the first publish
                        await server.unload_adapter(name)
                    await server.load_adapter(name, str(adapter_folder(folder, name)))
                await server.update_weight_version(version)

        return Sent(size * len(servers), await self._try_each(servers, load, num_bytes=size))


_VERSION = "v[0-9][0-9][0-9][0-9][0-9][0-9]"


def remove_versions(folder: Path) -> None:
    """Remove the whole models that a run which has ended published in `folder`.

    A resumed run publishes anew, from its checkpoint. Adapters stay: they are small.
    """
    for version in [*folder.glob(_VERSION), *folder.glob(f".{_VERSION}.partial")]:
        if not (version / "adapter_config.json").exists():
            shutil.rmtree(version, ignore_errors=True)


WHOLE, CHANGES, TENSORS = "whole", "changes", "tensors"
"""Folders of a version: all weights, the changed elements, and the tensors that contain them."""


class ChangesTransport(FolderTransport):
    """Only what an update changed. Remembers the version of each server; writes all weights only on demand.

    The embedded server reads the changed elements, and so does a real SGLang that was started with
    `CHANGES_LOADER`. The embedded server rejects them by a checksum if it has other base weights. SGLang
    cannot reject them, so its version is checked first. Any other SGLang reads the changed tensors as a
    whole. A server without the previous version (restarted, new, or after a failed update) gets all weights.
    """

    def __init__(self, learner: LearnerCalls, config: WeightsConfig, *, folder: Path) -> None:
        super().__init__(learner, config, folder=folder)
        self._version: int | None = None  # the last version written
        # The version that the changes of `_version` apply to; None: they were not written.
        self._base: int | None = None
        self._holds: dict[str, int] = {}  # url -> version
        self._written: dict[str, int] = {}  # folder of the last version -> bytes of what servers read there

    async def prepare(self, version: int) -> None:
        if version == self._version:  # published again, for servers that missed the first attempt
            return
        # Until they are written no version is known: after a failure, the learner's changes are relative to
        # weights that no server has, so all weights are written next.
        base, self._version, self._written = self._version, None, {}
        await self._write(version, WHOLE if base is None else CHANGES)
        self._base, self._version = base, version
        self._keep_newest(2)

    async def send(self, version: int, servers: Sequence[SGLangClient], hold: Hold) -> Sent:
        infos: dict[str, Mapping[str, Any]] = {}  # of the servers that have the base
        # Forgotten until the update succeeds: a failed one may leave any weights.
        held = {server.url: self._holds.pop(server.url, None) for server in servers}

        async def ask(server: SGLangClient) -> None:
            is_known = self._base is not None and held[server.url] == self._base
            if is_known and (await server.model_info()).version == self._base:
                infos[server.url] = await server.server_info()

        failed = await for_each(servers, ask, timeout_s=PING_S, limit="the time limit of a request")
        with_base = [server for server in servers if server.url in infos]
        without_base = [server for server in servers if server.url not in {**infos, **failed}]
        folders = {url: TENSORS if _reader(info) == TENSORS else CHANGES for url, info in infos.items()}
        # Written here, so that no server's deadline runs while the learner writes.
        if TENSORS in folders.values():
            await self._write(version, TENSORS)

        async def load_changes(server: SGLangClient) -> None:
            async with hold(server) as may_flush:
                try:
                    await self._load_changes(server, infos[server.url], version, may_flush=may_flush)
                except RequestRefused:  # its weights are not the expected base
                    without_base.append(server)
                    raise  # it stays paused until it has all weights

        async def load_whole(server: SGLangClient) -> None:
            async with hold(server) as may_flush:
                path = self._folder_of(version) / WHOLE
                await server.update_weights_from_disk(str(path), version=version, flush_cache=may_flush)

        num_bytes = max((self._written[folder] for folder in folders.values()), default=0)
        failed |= await self._try_each(with_base, load_changes, num_bytes=num_bytes)
        if without_base:
            await self._write(version, WHOLE)
            refused = {server.url for server in without_base}
            failed = {url: why for url, why in failed.items() if url not in refused}
            folders |= dict.fromkeys(refused, WHOLE)
            failed |= await self._try_each(without_base, load_whole, num_bytes=self._written[WHOLE])
        updated = [server.url for server in servers if server.url not in failed]
        self._holds |= dict.fromkeys(updated, version)
        return Sent(sum(self._written[folders[url]] for url in updated), failed)

    async def _write(self, version: int, what: str) -> None:
        """Write one of the folders of a version, unless it is written."""
        if what in self._written:
            return
        folder = str(self._folder_of(version) / what)
        if what == WHOLE:
            await self._learner.run(Learner.write_base, folder, bool(self._written))
            self._written[what] = sum_bytes(await self._tensor_specs())
        elif what == CHANGES:
            self._written[what] = await self._learner.run(Learner.write_changes, folder)
        else:
            self._written[what] = await self._learner.run(Learner.write_changed_tensors, folder)

    async def _load_changes(
        self, server: SGLangClient, info: Mapping[str, Any], version: int, *, may_flush: bool
    ) -> None:
        reader, folder = _reader(info), self._folder_of(version)
        if reader == CHANGES_LOADER:
            with suppress(RequestRefused):  # refused unless an aborted attempt left a session open
                await server.end_weight_update()
            await server.begin_weight_update()
            await server.update_weights_from_tensor(
                pickle_text(str((folder / CHANGES / CHANGES_FILE).absolute())),
                num_ranks=parse_setting(info, "tp_size", default=1, server=server.url),
                version=version,
                flush_cache=may_flush,
                loader=CHANGES_LOADER,
            )
            await server.end_weight_update()
            return
        path, load_format = (folder / TENSORS, "auto") if reader == TENSORS else (folder / CHANGES, reader)
        await server.update_weights_from_disk(
            str(path), version=version, flush_cache=may_flush, load_format=load_format
        )


def _reader(info: Mapping[str, Any]) -> str:
    """Return how a server reads changes: CHANGES_FORMAT or CHANGES_LOADER; TENSORS if it cannot."""
    if info.get("knows_changes") is True:
        return CHANGES_FORMAT
    # SGLang takes no tensors in requests if it has several copies of the model.
    is_single = info.get("dp_size") in (None, 0, 1)
    return (
        CHANGES_LOADER
        if is_single and CHANGES_LOADER in (info.get("custom_weight_loader") or ())
        else TENSORS
    )
