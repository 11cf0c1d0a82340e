"""Which part of the program belongs to which row of docs/architecture.md."""

ROWS = [
    {
        "types",
        "errors",
        "fast_pickle",
        "granted",
        "guard",
        "heap",
        "interrupts",
        "loopback",
        "ports",
        "terminal_text",
    },
    {"config", "plugins", "tracking", "http", "sandbox", "workers"},
    {"verl", "images"},
    {"data", "chat", "dialects", "sglang", "algorithms", "rewards", "adapters", "boxes"},
    {"rollout", "serving", "buffer", "learner", "figures", "hubs"},
    {"evaluation", "testing", "fleet", "weights", "view"},
    {"controller", "simulation"},
    {"offline", "doctor"},
    {"cli"},
]
MAY_IMPORT_VERL = {"agentrl.adapters.catalog", "agentrl.cli.configs"}
"""Modules outside of `agentrl.verl` that may import it: nothing else depends on what only translates."""
PLUGINS = {"agents", "tools", "interactions"}
