"""`agentrl data ...`: convert data sets of all kinds to Parquet files of rows.

Inspect and filter files of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli.options import Debug
from agentrl.config.storage_urls import shown_path
from agentrl.errors import UserError
from agentrl.extras.datatools.instructions import PLACEHOLDER
from agentrl.extras.datatools.options import (
    Agent,
    DataSource,
    Deduplicate,
    DifficultyFrom,
    In,
    Interaction,
    MaxPassRate,
    MinPassRate,
    Out,
    Plugin,
    Revision,
    Seed,
    Split,
    Subset,
    System,
    Template,
    TestShare,
    Tools,
    Unattempted,
    read_text,
    say_written,
    selection_of,
)

if TYPE_CHECKING:
    from agentrl.extras.datatools.convert import Kind, Written
    from agentrl.extras.datatools.task_rows import RowStyle

KINDS: Mapping[Kind, str] = {
    "gsm8k": "Write GSM8K from its original {question, answer}. Without --agent, or with `--agent mixed`, "
    "three agents alternate.",
    "aime": "Write AIME's problems, or other problems whose answers are whole numbers from 0 to 999, "
    "from {problem, answer}; one file per split.",
    "math": "Write MATH, MATH-500 or another set of {problem, solution, answer, level, subject}.",
    "code": "Write programming tasks with test cases: APPS, MBPP, HumanEval, or {prompt, test_cases}.",
}


def data_arithmetic(
    out: Out,
    train_rows: Annotated[int, typer.Option("--train", min=1, help="Number of training rows.")] = 3000,
    val_rows: Annotated[int, typer.Option("--val", min=1, help="Number of validation rows.")] = 192,
    sft_rows: Annotated[
        int, typer.Option("--sft", min=1, help="Number of conversations for the supervised warm start.")
    ] = 6000,
    kinds: Annotated[
        str, typer.Option(help="Kinds of rows, with commas between: tool, easy, interaction.")
    ] = "tool,easy,interaction",
    tool_use: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of the warm start's products that are computed by the tool."),
    ] = 0.5,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    debug: Debug = False,
) -> None:
    """Write sums for three kinds of agent: some need the calculator, some do not, some get feedback and a
    second try.
    """
    from agentrl.data.storage import mirrored_folder
    from agentrl.extras.datatools.arithmetic import ArithmeticMix, read_kinds, write_arithmetic

    mix = ArithmeticMix(kinds=read_kinds(kinds), sft_tool_use=tool_use)
    with mirrored_folder(out) as folder:
        write_arithmetic(folder, seed=seed, num_train=train_rows, num_val=val_rows, num_sft=sft_rows, mix=mix)
    typer.echo(f"wrote train.parquet, val.parquet and sft.parquet to {shown_path(out)}")


def writer(kind: Kind) -> Callable[..., None]:
    """Return the command that writes a data set of this kind."""

    def write(
        out: Out,
        source: In = None,
        subset: Subset = None,
        split: Split = None,
        revision: Revision = None,
        agent: Agent = None,
        tools: Tools = "",
        interaction: Interaction = None,
        plugin: Plugin = None,
        system: System = None,
        template: Template = PLACEHOLDER,
        data_source: DataSource = None,
        deduplicate: Deduplicate = False,
        test_share: TestShare = 0.0,
        seed: Seed = 0,
        difficulty_from: DifficultyFrom = None,
        min_pass_rate: MinPassRate = 0.0,
        max_pass_rate: MaxPassRate = 1.0,
        unattempted: Unattempted = "drop",
        debug: Debug = False,
    ) -> None:
        from agentrl.data.storage import mirrored_folder
        from agentrl.extras.datatools.convert import default_source, write_data_set
        from agentrl.extras.datatools.originals import OriginalSource

        selection = selection_of(
            deduplicate=deduplicate,
            test_share=test_share,
            seed=seed,
            difficulty_from=difficulty_from,
            min_pass_rate=min_pass_rate,
            max_pass_rate=max_pass_rate,
            unattempted=unattempted,
        )
        styles = _styles(kind, agent, tools, interaction, plugin, system, template)
        place = OriginalSource(source or default_source(kind), subset, split, revision)
        with mirrored_folder(out) as folder:
            written = write_data_set(
                kind, folder, place, styles=styles, selection=selection, data_source=data_source
            )
        _say(out, written)

    return write


def data_hf(
    name: Annotated[
        str, typer.Argument(metavar="PATH|URL|OWNER/NAME", help="Dataset of the hub, or files of your own.")
    ],
    out: Out,
    prompt_column: Annotated[str, typer.Option(help="Column of the question: text, or one user message.")],
    data_source: Annotated[
        str, typer.Option(help="Name that chooses the reward: one of reward.sources, or your own.")
    ],
    answer_column: Annotated[
        str | None, typer.Option(help="Column of the ground truth; default: none.")
    ] = None,
    difficulty_column: Annotated[
        str | None, typer.Option(help="Column of the difficulty, kept as extra_info.difficulty.")
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(help="Column of the problem's name, kept as extra_info.id.")
    ] = None,
    ability: Annotated[str, typer.Option(help="Label of the ability that the rows test.")] = "",
    subset: Subset = None,
    split: Split = None,
    revision: Revision = None,
    agent: Agent = None,
    tools: Tools = "",
    interaction: Interaction = None,
    plugin: Plugin = None,
    system: System = None,
    template: Template = PLACEHOLDER,
    deduplicate: Deduplicate = False,
    test_share: TestShare = 0.0,
    seed: Seed = 0,
    difficulty_from: DifficultyFrom = None,
    min_pass_rate: MinPassRate = 0.0,
    max_pass_rate: MaxPassRate = 1.0,
    unattempted: Unattempted = "drop",
    debug: Debug = False,
) -> None:
    """Write any data set, of the hub or of local files, by the columns that you name."""
    from agentrl.data.storage import mirrored_folder
    from agentrl.extras.datatools.convert import write_columns
    from agentrl.extras.datatools.originals import OriginalSource
    from agentrl.extras.datatools.problems import Columns

    selection = selection_of(
        deduplicate=deduplicate,
        test_share=test_share,
        seed=seed,
        difficulty_from=difficulty_from,
        min_pass_rate=min_pass_rate,
        max_pass_rate=max_pass_rate,
        unattempted=unattempted,
    )
    columns = Columns(prompt_column, answer_column, difficulty_column, id_column)
    styles = _styles(None, agent, tools, interaction, plugin, system, template)
    source = OriginalSource(name, subset, split, revision)
    with mirrored_folder(out) as folder:
        written = write_columns(
            columns,
            folder,
            source,
            styles=styles,
            selection=selection,
            data_source=data_source,
            ability=ability,
        )
    _say(out, written)


def data_preference(
    out: Out,
    source: Annotated[
        str,
        typer.Option(
            "--in",
            metavar="PATH|URL|OWNER/NAME",
            help="Pairs: a file, a folder, a URL, or a dataset of the hub.",
        ),
    ],
    subset: Subset = None,
    split: Split = None,
    revision: Revision = None,
    prompt_column: Annotated[
        str, typer.Option(help="Column of the prompt, text or messages; may be absent.")
    ] = "prompt",
    chosen_column: Annotated[
        str, typer.Option(help="Column of the preferred answer, text or messages.")
    ] = "chosen",
    rejected_column: Annotated[str, typer.Option(help="Column of the rejected answer.")] = "rejected",
    data_source: Annotated[str, typer.Option(help="Name of the dataset, stored in the rows.")] = "preference",
    deduplicate: Deduplicate = False,
    test_share: TestShare = 0.0,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Write pairs of answers of which one was preferred, as `agentrl rm` reads them."""
    from agentrl.data.storage import mirrored_folder
    from agentrl.extras.datatools.originals import OriginalSource
    from agentrl.extras.datatools.pairs import write_pairs
    from agentrl.extras.datatools.selection import Selection

    columns = {"prompt": prompt_column, "chosen": chosen_column, "rejected": rejected_column}
    selection = Selection(deduplicate, test_share, seed)
    place = OriginalSource(source, subset, split, revision)
    with mirrored_folder(out) as folder:
        written = write_pairs(folder, place, selection, data_source=data_source, **columns)
    _say(out, written)


def data_filter(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Parquet or JSON-lines file of rows, or a URL.")
    ],
    out: Annotated[
        str,
        typer.Argument(metavar="OUT.parquet", help="File or URL to write; all columns are kept unchanged."),
    ],
    deduplicate: Deduplicate = False,
    difficulty_from: DifficultyFrom = None,
    min_pass_rate: MinPassRate = 0.0,
    max_pass_rate: MaxPassRate = 1.0,
    unattempted: Unattempted = "drop",
    debug: Debug = False,
) -> None:
    """Keep some rows of a file: without duplicates, or of a band of difficulty."""
    from agentrl.data.storage import local_path, mirrored_file
    from agentrl.extras.datatools.convert import filter_rows

    if not shown_path(out).endswith(".parquet"):
        raise UserError(f"{shown_path(out)!r} must end in .parquet")
    selection = selection_of(
        deduplicate=deduplicate,
        test_share=0.0,
        seed=0,
        difficulty_from=difficulty_from,
        min_pass_rate=min_pass_rate,
        max_pass_rate=max_pass_rate,
        unattempted=unattempted,
    )
    with mirrored_file(out) as target:
        written = filter_rows(local_path(file), target, selection)
    _say(shown_path(out).rpartition("/")[0] or ".", written)


def data_show(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Parquet or JSON-lines file, or a URL: rows, pairs, conversations or trajectories.",
        ),
    ],
    row: Annotated[int | None, typer.Option(min=0, help="Show this row, counted from 0.")] = None,
    random_row: Annotated[bool, typer.Option("--random", help="Show a random row.")] = False,
    rows: Annotated[int, typer.Option(min=0, help="Show the first rows.")] = 1,
    debug: Debug = False,
) -> None:
    """Look at a file: columns, rows per data source and agent, lengths, and some rows as conversations."""
    from agentrl.data.storage import local_path
    from agentrl.extras.datatools.show import choose_rows, show_file
    from agentrl.tracking.terminal import VisibleConsole

    show_file(
        local_path(file),
        lambda count: choose_rows(count, row=row, is_random=random_row, first=rows),
        VisibleConsole(),
    )


def _styles(
    kind: Kind | None,
    agent: str | None,
    tools: str,
    interaction: str | None,
    plugin: list[str] | None,
    system: str | None,
    template: str,
) -> list[RowStyle]:
    from agentrl.extras.datatools.convert import choose_styles
    from agentrl.plugins import load_plugins

    return choose_styles(
        kind,
        agent=agent,
        tools=[name.strip() for name in tools.split(",") if name.strip()],
        interaction=interaction,
        system=None if system is None else read_text("--system", system),
        template=read_text("--template", template),
        plugins=load_plugins(plugin or ()),
    )


def _say(out: str, written: Written) -> None:
    for note in written.notes:
        typer.echo(note)
    say_written(out, written.rows)
