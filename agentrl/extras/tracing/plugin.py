"""What this room registers: traces."""

REGISTERS = {
    "agentrl.tracing": {
        "otlp": "agentrl.extras.tracing.otlp:OtlpTracing",
    },
    "agentrl.listeners": {
        "spans": "agentrl.extras.tracing.span_loss:SpanLossListener",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
