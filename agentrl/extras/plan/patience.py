"""`Patience`: ends a simulation that makes no steps, with a line that says why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import trio

from agentrl.buffer.ledger import NO_VARIANCE
from agentrl.extras.plan.fleet import RolloutActor
from agentrl.extras.plan.workload import Script, ScriptSource

STALL_S = 100_000.0
"""Simulated seconds without a step that are too many: more than a day."""
MOST_TRIES = 100
"""Attempts per attempt of a batch without a step that are too many."""
_CURES: Mapping[str, str] = {
    "timeout": "a larger agent.trajectory_timeout_s",
    "tool_error": "a smaller simulation.tool_failure",
    "model_error": "a larger simulation.server_mtbf_h",
    NO_VARIANCE: "a simulation.pass_rate between 0 and 1, or buffer.drop_constant_groups=false",
}
"""What helps, by the outcome of attempts that fail and by the reason for which groups are dropped."""


class Patience:
    """Counts the attempts since the last step: `agentrl.extras.plan.workload.ScriptSource` of `scripts`.

    most: attempts without a step that are too many.
    """

    def __init__(self, scripts: ScriptSource, *, most: int) -> None:
        self._scripts = scripts
        self._most = most
        self._num = 0
        self._last_step_at = 0.0
        self.scope = trio.CancelScope(deadline=STALL_S)
        """Of the simulation; it is cancelled if there is no step for too long, or for too many attempts."""

    def next(self, group_id: int, member: int) -> Script:
        """Return the script of the next attempt of a member."""
        self._num += 1
        if self._num > self._most:
            self.scope.cancel()
        return self._scripts.next(group_id, member)

    def stepped(self) -> None:
        """Begin to count again."""
        self._num, self._last_step_at = 0, trio.current_time()
        self.scope.deadline = self._last_step_at + STALL_S

    def reason(self, step: int, actors: Sequence[RolloutActor], dropped: Mapping[str, int]) -> str:
        """Return the line about a simulation that waits for `step`. dropped: groups by reason."""
        seconds = trio.current_time() - self._last_step_at
        ended: Counter[str] = Counter()
        for actor in actors:
            stats = actor.manager.stats()
            ended.update({name[8:]: int(num) for name, num in stats.items() if name.startswith("outcome/")})
        groups = Counter({reason: num for reason, num in dropped.items() if num})
        facts = [f"{num:,} attempts {outcome}" for outcome, num in ended.most_common()]
        facts += [f"{num:,} groups dropped for {reason}" for reason, num in groups.most_common()]
        causes = [name for name, _ in (*ended.most_common(), *groups.most_common()) if name in _CURES]
        cure = _CURES[causes[0]] if causes else "shorter attempts, or faster servers, ranks and publishes"
        return (
            f"step {step} is not over after {seconds:,.1f} simulated seconds and {self._num:,} attempts "
            f"({', '.join(facts) or 'none has ended'}); use {cure}"
        )
