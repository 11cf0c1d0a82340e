"""Publishing of new weights to the servers."""
