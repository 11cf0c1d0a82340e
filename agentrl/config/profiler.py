"""Config of profilers for whole processes.

`trainer.profile_steps` records single steps from within a process.
"""

from __future__ import annotations

from collections.abc import Collection

from pydantic import Field

from agentrl.config.placement import Role
from agentrl.config.section import Section


class NsightConfig(Section):
    """NVIDIA Nsight Systems around each process of some roles, for the whole run; it must be installed where
    they run.
    """

    roles: tuple[Role, ...] = Field(
        (), description="Roles whose processes are recorded, in nsight/ of the run directory; []: none."
    )
    options: dict[str, str] = Field(
        {"t": "cuda,cudnn,cublas,nvtx", "stop-on-exit": "true"},
        description="Options of `nsys profile`, without dashes.",
    )

    def refuse_absent(self, present: Collection[Role]) -> None:
        """Check that the run has all roles that are to be recorded.

        Raises:
            ValueError: it does not.
        """
        absent = [role for role in self.roles if role not in present]
        if absent:
            raise ValueError(
                f"profiler.nsight.roles names {absent[0]}, which this run does not have; it has: "
                f"{', '.join(present)}"
            )


class ProfilerConfig(Section):
    """Profilers of whole processes."""

    nsight: NsightConfig = NsightConfig()
