"""What this room registers: what watches a run."""

REGISTERS = {
    "agentrl.listeners": {
        "alarms": "agentrl.extras.watch.alarms:AlarmListener",
        "failed_share": "agentrl.extras.watch.failed_share:FailedShareListener",
        "silent_roles": "agentrl.extras.watch.silent_roles:silent_roles",
        "watchdog": "agentrl.extras.watch.watchdog:watchdog",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
