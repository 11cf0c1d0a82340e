"""A tool that is a typed function."""


async def word_count(text: str) -> int:
    """Count the words of a text.

    Args:
        text: any text
    """
    return len(text.split())
