"""Built-in interactions."""
