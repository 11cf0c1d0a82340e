"""The config of a command of its own."""

from pydantic import Field

from agentrl.config.section import Section


class WalkConfig(Section):
    steps: int = Field(3, ge=1, description="Steps of the walk.")
