"""Workers: classes that declare how their methods run on ranks, and groups of ranks that act as one
object.
"""
