"""`agentrl docs`: shows the packaged documentation."""

from __future__ import annotations

import difflib
import sys
from importlib.resources import abc, files
from typing import Annotated

import typer

from agentrl.cli.options import Debug
from agentrl.errors import UserError

INDEX = "README"


def docs(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]", help="A page, such as quickstart or config; default: the list of pages."
        ),
    ] = INDEX,
    debug: Debug = False,
) -> None:
    """Read a page of the documentation; needs no network. Without a name: what there is, in the order in
    which most people need it.
    """
    text = read_page(name)
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    with console.pager(styles=True):
        console.print(Markdown(text))


def pages() -> dict[str, abc.Traversable]:
    """Return all pages by name: those of docs/, and the README of each extra by the name of its room."""
    rooms = {room.name: room / "README.md" for room in files("agentrl.extras").iterdir()}
    own = {page.name[:-3]: page for page in files("agentrl.docs").iterdir() if page.name.endswith(".md")}
    return {name: page for name, page in sorted((rooms | own).items()) if page.is_file()}


def read_page(name: str) -> str:
    """Return a page as Markdown. `name`: as in `pages`; a folder and the ending `.md` are ignored.

    Raises:
        UserError: there is no such page.
    """
    wanted = name.removesuffix(".md").removesuffix("/README").rpartition("/")[2]
    names = pages()
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=3)
        found = f"did you mean {', '.join(near)}?" if near else f"the pages: {', '.join(names)}"
        raise UserError(f"no page {name!r} in the documentation; {found}")
    return names[wanted].read_text(encoding="utf-8")
