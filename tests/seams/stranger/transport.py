"""A transport that keeps every version it ever sent, with one line about each."""

from agentrl.config.transports import TransportKind
from agentrl.weights.disk import FolderTransport


class KeptTransport(FolderTransport):
    """Folders that stay."""

    async def prepare(self, version: int) -> None:
        await super().prepare(version)
        with (self._folder.parent / "sent.txt").open("a") as file:
            file.write(f"{version}\n")


TRANSPORT = TransportKind("kept", KeptTransport, is_on_disk=True)
