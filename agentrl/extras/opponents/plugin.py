"""What this room registers: opponents that follow the policy."""

REGISTERS = {
    "agentrl.listeners": {
        "opponents": "agentrl.extras.opponents.refresh:opponents",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
