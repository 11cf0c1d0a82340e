"""The replay buffer: ledger and store."""
