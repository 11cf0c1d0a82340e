"""Images in conversations: their files, the placeholders that stand for them, and their positions."""
