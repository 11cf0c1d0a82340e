"""`agentrl docs`: shows the packaged documentation."""

from __future__ import annotations

import difflib
import sys
from importlib.resources import files
from typing import Annotated

import typer

from agentrl.cli.options import Debug
from agentrl.errors import UserError

PACKAGE = "agentrl.docs"
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


def page_names() -> list[str]:
    """Return the names of all pages, sorted."""
    return sorted(
        entry.name.removesuffix(".md") for entry in files(PACKAGE).iterdir() if entry.name.endswith(".md")
    )


def read_page(name: str) -> str:
    """Return a page as Markdown. `name`: as in `page_names`; a folder and the ending `.md` are ignored.

    Raises:
        UserError: there is no such page.
    """
    wanted = name.rpartition("/")[2].removesuffix(".md")
    names = page_names()
    if wanted not in names:
        near = difflib.get_close_matches(wanted, names, n=3)
        found = f"did you mean {', '.join(near)}?" if near else f"the pages: {', '.join(names)}"
        raise UserError(f"no page {name!r} in the documentation; {found}")
    return (files(PACKAGE) / f"{wanted}.md").read_text(encoding="utf-8")
