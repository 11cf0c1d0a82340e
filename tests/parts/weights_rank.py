"""One rank of a stand-in for a server with tensor parallelism, as a process of its own; it imports little,
because several are started.
"""

import torch

from agentrl.servers.process_group import (
    broadcast,
    join_weights_group,
    leave_weights_group,
    tensor_checksum,
    unflatten,
)


def rank(pipe):
    """One process of a server: joins, receives and leaves as it is told, and returns the checksums of what it
    received.
    """
    group, sums = None, {}
    while (order := pipe.recv()) is not None:
        what, body = order
        if what == "join":
            group = join_weights_group(**body, timeout_s=30.0)
        elif what == "receive":
            specs = [
                (getattr(torch, dtype), tuple(shape))
                for dtype, shape in zip(body["dtypes"], body["shapes"], strict=True)
            ]
            flat = torch.empty(
                sum(d.itemsize * torch.Size(shape).numel() for d, shape in specs), dtype=torch.uint8
            )
            broadcast(flat, group)
            sums |= {
                name: tensor_checksum(tensor)
                for name, tensor in zip(body["names"], unflatten(flat, specs), strict=True)
            }
        else:
            leave_weights_group(group)
        pipe.send(sums)
