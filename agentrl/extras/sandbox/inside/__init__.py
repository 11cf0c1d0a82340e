"""Code of the reward `code` that runs in the sandbox, with the standard library alone: program side and test
side.

The two sides are separate processes, each behind its own walls. They exchange plain data, which the host also
reads.
"""
