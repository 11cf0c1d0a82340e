"""What runs in the sandbox for the reward `code`, on the standard library alone: the program's side, and the test's side.

The two are processes of their own, each behind its own walls, and exchange plain data. The host reads the same data.
"""
