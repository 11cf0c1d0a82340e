"""Serves a policy as SGLang does: see parts/played_server.py."""

from parts.played_server import main

if __name__ == "__main__":
    main()
