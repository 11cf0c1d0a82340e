"""What this room registers: rewards that read answers."""

REGISTERS = {
    "agentrl.interactions": {
        "gsm8k": "agentrl.extras.answers.gsm8k_partner:Gsm8k",
    },
    "agentrl.rewards": {
        "aime": "agentrl.extras.answers.aime:Aime",
        "arithmetic": "agentrl.extras.answers.arithmetic:Arithmetic",
        "exact_match": "agentrl.extras.answers.exact_match:ExactMatch",
        "format": "agentrl.extras.answers.format:Format",
        "gsm8k": "agentrl.extras.answers.gsm8k:Gsm8k",
        "length_penalty": "agentrl.extras.answers.length_penalty:LengthPenalty",
        "math": "agentrl.extras.answers.math:Math",
    },
    "agentrl.tools": {
        "calc_gsm8k_reward": "agentrl.extras.answers.gsm8k_tool:Gsm8kReward",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
