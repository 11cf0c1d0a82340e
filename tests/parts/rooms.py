"""Which part of the program belongs to which row of docs/architecture.md."""

ROWS = [
    {"types", "errors", "granted", "guard", "heap", "loopback", "ports", "terminal_text"},
    {"config", "plugins", "tracking", "http", "sandbox", "workers"},
    {"verl"},
<<<<<<< HEAD
    {"data", "chat", "dialects", "sglang", "algorithms", "rewards", "adapters", "boxes"},
    {"rollout", "serving", "buffer", "learner", "figures"},
=======
    {"data", "chat", "dialects", "sglang", "algorithms", "rewards", "adapters"},
    {"rollout", "serving", "buffer", "learner", "figures", "hubs"},
>>>>>>> 35237c2 (Tasks of reasoning-gym's generators are rows, scored by the generators themselves; no answer of a model is run)
    {"evaluation", "testing", "fleet", "weights", "view"},
    {"controller", "simulation"},
    {"offline", "doctor"},
    {"cli"},
]
MAY_IMPORT_VERL = {"agentrl.adapters.catalog", "agentrl.cli.configs"}
"""Modules outside of `agentrl.verl` that may import it: nothing else depends on what only translates."""
PLUGINS = {"agents", "tools", "interactions"}
