"""What this room registers: rewards and a tool that run programs."""

REGISTERS = {
    "agentrl.rewards": {
        "code": "agentrl.extras.sandbox.code_reward:Code",
        "terminal": "agentrl.extras.sandbox.terminal_reward:TerminalReward",
        "tests_pass": "agentrl.extras.sandbox.tests_pass:TestsPass",
    },
    "agentrl.start_notes": {
        "sandbox": "agentrl.extras.sandbox:sandbox_reports",
    },
    "agentrl.tools": {
        "python": "agentrl.extras.sandbox.python_tool:Python",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
