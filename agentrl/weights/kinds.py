"""The transports of this package, as a config sees them."""

from __future__ import annotations

from agentrl.config.transports import TransportKind

DISK = TransportKind(
    "disk", "agentrl.weights.disk:open_disk", sends_changes=True, sends_adapters=True, is_on_disk=True
)
DISTRIBUTED = TransportKind("distributed", "agentrl.weights.group:GroupTransport", has_sources=True)
TENSOR = TransportKind(
    "tensor",
    "agentrl.weights.tensor:TensorTransport",
    refused_by={"embedded": "the embedded server (backend=embedded) accepts no pickled tensors"},
)
