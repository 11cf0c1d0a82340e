"""The replay buffer: ledger, journal and curriculum."""
