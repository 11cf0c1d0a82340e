"""What this room registers: opponents that follow the policy."""

REGISTERS = {
    "agentrl.closing_notes": {
        "opponents": "agentrl.extras.opponents.closing:opponent_lines",
    },
    "agentrl.listeners": {
        "opponents": "agentrl.extras.opponents.refresh:opponents",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
