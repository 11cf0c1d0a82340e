"""How DeepSeek, Gemma, GLM, gpt-oss, Kimi, Qwen3-Coder and models that call in Python write tool calls."""
