"""What this room registers: the gateway and an agent that plays through it."""

REGISTERS = {
    "agentrl.agents": {
        "openai_agent": "agentrl.extras.gateway.openai_agent:OpenAIAgent",
    },
    "agentrl.gateways": {
        "openai": "agentrl.extras.gateway.gateway:Gateway",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
