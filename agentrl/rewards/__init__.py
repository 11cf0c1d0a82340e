"""The rule rewards and the loader of the user's function."""
