"""What this room registers: agent loops."""

REGISTERS = {
    "agentrl.agents": {
        "math_expression": "agentrl.extras.agents.math_expression:MathExpression",
        "react_agent": "agentrl.extras.agents.react_agent:ReactAgent",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
