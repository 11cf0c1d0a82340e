"""Warnings about what a config needs from outside: its model, its data, the model's context."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.config.schema import Config


def context_warning(config: Config) -> str | None:
    """Return a sentence if prompt and response do not fit into the context of a model in a local folder."""
    prompt, response = config.data.max_prompt_tokens, config.agent.max_response_tokens
    context = _context_tokens(Path(config.model.path)) if config.model.path else None
    if context is None or prompt + response <= context:
        return None
    left = (
        "no room is left for an answer"
        if prompt >= context
        else f"after the longest prompt, {context - prompt:,} tokens are left of the response"
    )
    return (
        f"data.max_prompt_tokens={prompt} + agent.max_response_tokens={response} exceed the context of "
        f"model.path, {context:,} tokens (max_position_embeddings): {left}"
    )


def _context_tokens(folder: Path) -> int | None:
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        context = (described.get("text_config") or described).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None  # the run itself reports a broken file at its start
    return context if isinstance(context, int) else None
