"""The process groups that weights arrive through.

Joining blocks until the learner joins too, and torch cannot cancel a join. So each join runs in a thread of
its own, within a deadline, and their number is bounded.
"""

from __future__ import annotations

import asyncio
from functools import partial

from torch.distributed import ProcessGroup

from agentrl.errors import InfrastructureError
from agentrl.extras.embedded.bounded_repr import shown
from agentrl.extras.embedded.threads import in_thread
from agentrl.servers.process_group import join_weights_group, leave_weights_group

JOIN_TIMEOUT_S = 120.0
"""Seconds within which a group must form, and within which each of its broadcasts must complete."""
_GRACE_S = 5.0
"""Added to the deadline, because torch enforces the same one itself."""
MAX_JOINS = 4
"""Joins that may wait at once. A run needs one group."""
MAX_GROUPS = 16


class WrongState(Exception):
    """A valid call at the wrong moment: an update outside a session, or a group that does not exist."""


class UpdateGroups:
    """The process groups of one server, by name. Used from its event loop only."""

    def __init__(self) -> None:
        self._groups: dict[str, ProcessGroup] = {}
        self._joining: set[str] = set()

    def get(self, name: str) -> ProcessGroup:
        """Return the group; raise WrongState if it was not joined."""
        group = self._groups.get(name)
        if group is None:
            raise WrongState(
                f"Failed to receive weights: Group {shown(name)} not in {sorted(self._groups)}. "
                "Please call `init_weights_update_group` first."
            )
        return group

    async def join(
        self, *, address: str, port: int, rank: int, world_size: int, name: str, backend: str
    ) -> None:
        """Join a group. Generation and updates continue meanwhile.

        Raises:
            WrongState: the name is taken, or too many groups exist or wait for their ranks.
            InfrastructureError: the group did not form within JOIN_TIMEOUT_S.
        """
        if name in self._groups or name in self._joining:
            raise WrongState(f"The group {shown(name)} exists already; destroy it first.")
        if len(self._joining) >= MAX_JOINS or len(self._groups) >= MAX_GROUPS:
            raise WrongState(
                f"{len(self._joining)} groups wait for their members, and {len(self._groups)} exist; "
                f"this server takes {MAX_JOINS} and {MAX_GROUPS}"
            )
        join = partial(
            join_weights_group,
            address=address,
            port=port,
            rank=rank,
            world_size=world_size,
            name=name,
            backend=backend,
            timeout_s=JOIN_TIMEOUT_S,
        )
        self._joining.add(name)
        joined = in_thread(join)
        joined.add_done_callback(partial(self._keep, name))
        # `wait` does not cancel the join when this call is cancelled: the thread keeps waiting and keeps its
        # slot.
        done, _ = await asyncio.wait({joined}, timeout=JOIN_TIMEOUT_S + _GRACE_S)
        if not done:
            raise InfrastructureError(
                f"the weights group {shown(name)} did not form within {JOIN_TIMEOUT_S:g} s"
            )
        joined.result()

    def _keep(self, name: str, joined: asyncio.Future[ProcessGroup]) -> None:
        self._joining.discard(name)
        if not joined.cancelled() and joined.exception() is None:
            self._groups[name] = joined.result()

    async def leave(self, name: str) -> None:
        """Leave a group; raise WrongState if it was not joined."""
        group = self._groups.pop(name, None)
        if group is None:
            raise WrongState("The group to be destroyed does not exist.")
        await in_thread(partial(leave_weights_group, group))
