"""What this room registers: formats in which models write tool calls."""

REGISTERS = {
    "agentrl.tool_formats": {
        "deepseek_v3": "agentrl.extras.formats.deepseek_v3:DeepSeekV3",
        "gemma4": "agentrl.extras.formats.gemma4:Gemma4",
        "glm": "agentrl.extras.formats.glm:Glm",
        "gpt_oss": "agentrl.extras.formats.gpt_oss:GptOss",
        "kimi_k2": "agentrl.extras.formats.kimi_k2:KimiK2",
        "pythonic": "agentrl.extras.formats.pythonic:Pythonic",
        "qwen3_coder": "agentrl.extras.formats.qwen3_coder:Qwen3Coder",
    },
}
"""By group of entry points, as pyproject.toml lists it: name -> object."""
