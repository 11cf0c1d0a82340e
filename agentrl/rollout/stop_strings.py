"""Stop strings for engines that only know tokens: tokens after a stop string are discarded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agentrl.chat.chat import Chat
from agentrl.types import Generation


def cut_at_stop(generation: Generation, stop: Sequence[str], chat: Chat) -> Generation:
    """Return the generation up to and including the token that completes a stop string, as an engine would
    have ended it.
    """
    ids = generation.token_ids.tolist()
    text = chat.decode(ids)
    if not any(string in text for string in stop):
        return generation
    low, high = 1, len(ids)  # binary search for the fewest tokens whose text contains a stop string
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
