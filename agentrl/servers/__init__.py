"""SGLang's native protocol: the client, and the process group of its weight updates."""
