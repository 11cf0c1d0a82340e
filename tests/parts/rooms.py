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
        "moved",
        "ports",
        "terminal_text",
    },
    {"registered"},
    {"config", "plugins", "tracking", "http", "testing"},
    {"data"},
    {"chat", "algorithms"},
    {"servers", "rewards", "adapters"},
    {"rollout", "buffer", "learner", "figures"},
    {"cluster"},
    {"weights", "evaluation"},
    {"controller"},
    {"cli"},
]
PLUGINS = {"agents", "tools", "interactions"}
