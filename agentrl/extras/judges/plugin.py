"""What this room registers: judges, remote rewards, a simulated user."""

REGISTERS = {
    "agentrl.interactions": {
        "simulated_user": "agentrl.extras.judges.simulated_user:SimulatedUser",
    },
    "agentrl.rewards": {
        "llm_judge": "agentrl.extras.judges.llm_judge:LLMJudge",
        "remote": "agentrl.extras.judges.remote:Remote",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
