"""A tool in a file of your own: list the file in `agent.plugins` and the tool in `agent.tools`."""

from agentrl.plugins import WrongCall, tool


@tool
def word_length(word: str) -> int:
    """Count the letters of a word.

    Args:
        word: One word, letters only.
    """
    word = word.strip()
    if not word.isalpha():
        raise WrongCall(f"{word!r} is not one word")
    return len(word)
