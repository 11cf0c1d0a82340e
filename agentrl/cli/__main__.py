"""`python -m agentrl.cli`: the command line by the interpreter at hand."""

from agentrl.cli import main

if __name__ == "__main__":
    main()
