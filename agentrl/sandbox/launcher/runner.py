"""Runs main.py beside it inside the sandbox; with `echo`, shows the value of a last expression as a prompt would.

argv: folders for sys.path, joined by colons; then "echo" or nothing.
"""

import _ast
import builtins
import sys


def show(kind, value, trace):  # noqa: ANN001, ANN201
    """Print the traceback from the program's own first line on."""
    import traceback

    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, value, trace)


def run(path, echo):  # noqa: ANN001, ANN201
    sys.excepthook = show
    sys.stdout.reconfigure(line_buffering=True)
    builtins.exit = builtins.quit = sys.exit  # what `site` would have given
    module = type(sys)("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    sys.argv[:] = ["main.py"]
    with open(path, "rb") as file:
        source = file.read()
    tree = compile(source, path, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
    last = tree.body.pop() if echo and tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    if last is not None:
        sys.displayhook(eval(compile(_ast.Expression(last.value), path, "eval", dont_inherit=True), module.__dict__))


if __name__ == "__main__":
    sys.path.insert(0, "")  # the working folder; the code's own folder has nothing to import
    sys.path.extend(path for path in sys.argv[1].split(":") if path)
    run(__file__.replace("runner.py", "main.py"), "echo" in sys.argv[2:])
