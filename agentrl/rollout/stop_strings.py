"""Stop strings, for engines that know only tokens: what a turn has beyond one is thrown away."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agentrl.chat.chat import Chat
from agentrl.types import Generation


def cut_at_stop(generation: Generation, stop: Sequence[str], chat: Chat) -> Generation:
    """Return the generation up to the token that completes a stop string, as an engine that knows the string would have ended it."""
    ids = generation.token_ids.tolist()
    text = chat.decode(ids)
    if not any(string in text for string in stop):
        return generation
    low, high = 1, len(ids)  # the fewest tokens whose text holds a stop string
    while low < high:
        middle = (low + high) // 2
        held = chat.decode(ids[:middle])
        low, high = (low, middle) if any(string in held for string in stop) else (middle + 1, high)
    return dataclasses.replace(
        generation,
        token_ids=generation.token_ids[:low],
        logprobs=generation.logprobs[:low],
        versions=generation.versions[:low],
        finish_reason="stop",
    )
