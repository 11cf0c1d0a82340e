"""Runs main.py beside it, inside the sandbox.

With `echo`, prints the value of a last expression, as a prompt does.

argv: folders for sys.path, joined by colons; then optionally "echo".
"""

from __future__ import annotations

import _ast
import builtins
import sys

TYPE_CHECKING = False  # importing typing would cost milliseconds at every start
if TYPE_CHECKING:
    from types import TracebackType


def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback without this file's frames."""
    import traceback

    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, value, trace)


def run(path: str, *, echo: bool) -> None:
    """Run the file as `__main__`."""
    sys.excepthook = show
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # still a TextIOWrapper here
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # `site` would define them, but -S skips it
    module = type(sys)("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.argv[:] = ["main.py"]
    with open(path, "rb") as file:
        source = file.read()
    tree = compile(source, path, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, _ast.Module)
    last = tree.body.pop() if echo and tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    if isinstance(last, _ast.Expr):
        sys.displayhook(
            eval(compile(_ast.Expression(last.value), path, "eval", dont_inherit=True), module.__dict__)
        )


if __name__ == "__main__":
    sys.path.insert(0, "")  # the working folder; this file's folder has nothing to import
    sys.path.extend(path for path in sys.argv[1].split(":") if path)
    run(__file__.replace("runner.py", "main.py"), echo="echo" in sys.argv[2:])
