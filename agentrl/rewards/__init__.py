"""Built-in rewards, and the loader of the user's reward function."""
