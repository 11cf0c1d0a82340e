"""What this room registers: traces."""

REGISTERS = {
    "agentrl.tracing": {
        "otlp": "agentrl.extras.tracing.otlp:OtlpTracing",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
