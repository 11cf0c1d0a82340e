"""What is asked of finished runs: replay, audit, comparison, contamination."""
