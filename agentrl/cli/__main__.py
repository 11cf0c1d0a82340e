"""`python -m agentrl.cli`: the command line, run by the current interpreter."""

from agentrl.cli import main

if __name__ == "__main__":
    main()
