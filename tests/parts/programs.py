"""Runs a test file as a program that can import these parts: `[*PROGRAM, __file__, argument, ...]`."""

import gc
import runpy
import sys
from pathlib import Path

PROGRAM = (sys.executable, __file__)

if __name__ == "__main__":
    gc.disable()  # it ends soon, and loading torch and transformers takes a fifth less time
    sys.path[0] = str(Path(__file__).parents[1])
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
