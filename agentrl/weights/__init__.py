"""Publishing new weights to the servers."""
