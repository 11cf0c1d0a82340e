"""What this room registers: tools that search."""

REGISTERS = {
    "agentrl.tools": {
        "retrieve": "agentrl.extras.search.retrieve:Retrieve",
        "search": "agentrl.extras.search.search:Search",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
