"""Options shared by the commands of `agentrl data`, and their conversion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl.config.storage_urls import shown_path
from agentrl.errors import DataError, UserError

if TYPE_CHECKING:
    from agentrl.extras.datatools.selection import Selection


Out = Annotated[str, typer.Argument(metavar="OUT", help="Folder or URL to write SPLIT.parquet into.")]
In = Annotated[
    str | None,
    typer.Option(
        "--in",
        metavar="PATH|URL|OWNER/NAME",
        help="Original files: a file, a folder, a URL, or a dataset of the hub; default: the folder of this "
        "name in $AGENTRL_DATA, else the hub.",
    ),
]
Subset = Annotated[
    str | None,
    typer.Option(help="Subset (configuration) of a dataset of the hub, such as main of openai/gsm8k."),
]
Split = Annotated[str | None, typer.Option(help="Write only this split; default: all.")]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit on the hub; default: the hub's converted Parquet files."),
]

Agent = Annotated[
    str | None,
    typer.Option(
        help="Agent that plays the rows; default: interaction_agent with --interaction, tool_agent with "
        "--tools."
    ),
]
Tools = Annotated[
    str, typer.Option(metavar="NAME,NAME", help="Tools that the rows offer; each receives the ground truth.")
]
Interaction = Annotated[
    str | None,
    typer.Option(help="Interaction that answers the agent; it receives the question and the ground truth."),
]
Plugin = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE.py", help="File of your own agents, tools or interactions; repeatable."),
]
System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT|@FILE", help="System message; '' for none; default: the instruction of the dataset."
    ),
]
Template = Annotated[
    str, typer.Option(metavar="TEXT|@FILE", help="User message; {question} is replaced by the question.")
]
DataSource = Annotated[
    str | None, typer.Option(help="Name that chooses the reward; default: that of the dataset.")
]

Deduplicate = Annotated[
    bool, typer.Option("--deduplicate", help="Remove repeated questions; they are counted in any case.")
]
TestShare = Annotated[
    float,
    typer.Option(min=0, max=1, help="Hold out this share of the questions of one split as test.parquet."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed that selects the held-out questions.")]
DifficultyFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="ATTEMPTS",
        help="Parquet file or folder of an evaluation or a run: rows are kept by how often they were solved.",
    ),
]
MinPassRate = Annotated[float, typer.Option(min=0, max=1, help="Keep rows solved at least this often.")]
MaxPassRate = Annotated[float, typer.Option(min=0, max=1, help="Keep rows solved at most this often.")]
Unattempted = Annotated[Literal["keep", "drop"], typer.Option(help="What to do with rows without attempts.")]


def say_written(out: str, rows: Mapping[str, int]) -> None:
    """Say which files of the folder or URL `out` were written, by the number of their rows."""
    place = shown_path(out).rstrip("/")
    for stem, count in rows.items():
        typer.echo(f"wrote {place}/{stem}.parquet: {count:,} row{'' if count == 1 else 's'}")


def read_text(option: str, value: str) -> str:
    """Return the text of an option; `@FILE` reads it from a file.

    Raises:
        DataError: the file cannot be read.
    """
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{option}={value!r} cannot be read: {error}") from error


def selection_of(
    *,
    deduplicate: bool,
    test_share: float,
    seed: int,
    difficulty_from: Path | None,
    min_pass_rate: float,
    max_pass_rate: float,
    unattempted: Literal["keep", "drop"],
) -> Selection:
    """Return the `Selection` that the options define.

    Raises:
        UserError: a difficulty band without attempts, or attempts that cannot be read.
    """
    from agentrl.extras.datatools.selection import Band, Selection

    if difficulty_from is None:
        if (min_pass_rate, max_pass_rate) != (0.0, 1.0):
            raise UserError(
                "--min-pass-rate and --max-pass-rate need --difficulty-from, the attempts of an earlier "
                "evaluation"
            )
        return Selection(deduplicate, test_share, seed)
    from agentrl.extras.datatools.pass_rates import read_pass_rates

    return Selection(
        deduplicate,
        test_share,
        seed,
        Band(read_pass_rates(difficulty_from).of, min_pass_rate, max_pass_rate, unattempted),
    )
