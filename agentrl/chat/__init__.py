"""Messages to tokens and back, append only."""
