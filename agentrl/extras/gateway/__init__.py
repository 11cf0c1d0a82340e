"""The wire formats in which programs ask for turns: OpenAI's chat completions and responses, Anthropic's
messages.
"""
