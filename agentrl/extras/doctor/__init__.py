"""`agentrl doctor`: exercises what a run needs on this machine, or on every node of a cluster.

One module per check, with `diagnose(subject)`. `checks.py` lists them. Each runs in a process of its own with
a deadline (`examine.py`), so a check that hangs or crashes costs one line of the report.
"""
