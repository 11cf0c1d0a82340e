"""Convert public data sets to Parquet files in the row schema of `agentrl.data.rows`, one file per split;
filter the rows of a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.data.atomic_files import appearing_whole
from agentrl.data.files import RawRow, open_rows, read_batch, write_rows
from agentrl.data.row_place import RowPlace
from agentrl.data.row_values import read_object
from agentrl.data.rows import AgentChoice, read_list
from agentrl.data.storage import local_path
from agentrl.errors import DataError
from agentrl.extras.datatools.benchmarks import FOLDER_VARIABLE
from agentrl.extras.datatools.code_problems import read_code
from agentrl.extras.datatools.instructions import (
    AIME_INSTRUCTION,
    CODE_INSTRUCTION,
    GSM8K_INSTRUCTION,
    MATH_INSTRUCTION,
    with_tools,
)
from agentrl.extras.datatools.originals import (
    SPLITS,
    DataFile,
    OriginalSource,
    open_originals,
    read_originals,
)
from agentrl.extras.datatools.pass_rates import first_user_text
from agentrl.extras.datatools.problems import (
    Columns,
    Problem,
    ProblemReader,
    read_aime,
    read_gsm8k,
    read_math,
)
from agentrl.extras.datatools.selection import Candidate, Selection, normalise, select, splits_of
from agentrl.extras.datatools.task_rows import RowStyle, task_row, task_schema
from agentrl.plugins import Plugins, load_plugins

Kind = Literal["gsm8k", "aime", "math", "code"]
MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class DataSetKind:
    """Properties of a kind of data set. `hub_name`: default data set on the hub; "": there is none."""

    read: ProblemReader
    ability: str
    instruction: str
    data_source: str
    hub_name: str = ""
    subset: str | None = None


DATA_SETS: Mapping[Kind, DataSetKind] = {
    "gsm8k": DataSetKind(read_gsm8k, "math", GSM8K_INSTRUCTION, "openai/gsm8k", "openai/gsm8k", "main"),
    "aime": DataSetKind(read_aime, "math", AIME_INSTRUCTION, "aime"),
    "math": DataSetKind(read_math, "math", MATH_INSTRUCTION, "math", "DigitalLearningGmbH/MATH-lighteval"),
    "code": DataSetKind(read_code, "code", CODE_INSTRUCTION, "codecontests"),
}


@dataclass(frozen=True, slots=True)
class Written:
    """Number of rows by stem of the written file, and notes on everything left out or moved."""

    rows: Mapping[str, int]
    notes: tuple[str, ...]


def default_source(kind: Kind) -> str | Path:
    """Return the default source: the folder AGENTRL_DATA/KIND, else the data set of the hub.

    Raises:
        DataError: there is neither.
    """
    folder = Path(os.environ[FOLDER_VARIABLE]) / kind if FOLDER_VARIABLE in os.environ else None
    if folder is not None and folder.is_dir():
        return folder
    if not DATA_SETS[kind].hub_name:
        raise DataError(
            f"give the original files of {kind} with --in: a file, a folder, or a dataset of the hub "
            "(owner/name)"
        )
    return DATA_SETS[kind].hub_name


def open_data_set(kind: Kind, source: OriginalSource) -> list[DataFile]:
    """Return the files of a data set; raises as `open_originals`."""
    subset, path = DATA_SETS[kind].subset, local_path(str(source.name))
    if source.subset is None and subset is not None and (not path.exists() or (path / subset).is_dir()):
        source = replace(source, subset=subset)
    files = open_originals(source)
    if kind != "gsm8k":
        return files
    # GSM8K's original folder also contains other solutions of the same questions.
    named = [file for file in files if file.split in SPLITS]
    if not named:
        raise DataError(
            f"{str(source.name)!r} has neither train.jsonl nor test.jsonl, GSM8K's original files"
        )
    return named


def data_source_of(kind: Kind, source: OriginalSource) -> Callable[[Problem], str]:
    """Return the function that names a row's data source.

    For AIME it is the file's name (aime_2024) or the name on the hub; all other kinds have a fixed name.
    """
    otherwise = DATA_SETS[kind].data_source
    if kind != "aime":
        return lambda _: otherwise
    if not Path(source.name).exists():
        otherwise = str(source.name)
    return lambda problem: problem.split if problem.split.lower().startswith("aime") else otherwise


# ----------------------------------------------------------------------------------------------------- styles


def choose_styles(
    kind: Kind | None,
    *,
    agent: str | None = None,
    tools: Sequence[str] = (),
    interaction: str | None = None,
    system: str | None = None,
    template: str = "{question}",
    plugins: Plugins | None = None,
) -> list[RowStyle]:
    """Return the styles of the rows: one style, or for GSM8K's `mixed` one per agent, which alternate.

    Args:
        agent: None: chosen by `AgentChoice` from the row's contents; GSM8K without tools and interaction is
            `mixed`.
        system: the system message, "" for none; None: the instruction of the data set.

    Raises:
        PluginError: an agent, tool or interaction is not registered.
        DataError: the agent does not use the given tools or interaction.
    """
    plugins = plugins or load_plugins()
    if kind == "gsm8k" and agent == MIXED and (tools or interaction):
        raise DataError(
            f"agent {MIXED!r} uses three agents with fixed tools and interaction: remove --tools and "
            "--interaction"
        )
    if kind == "gsm8k" and (agent == MIXED or not (agent or tools or interaction)):
        agents = ("single_turn_agent", "tool_agent", "interaction_agent")
        return [
            choose_styles(kind, agent=name, system=system, template=template, plugins=plugins)[0]
            for name in agents
        ]
    name = AgentChoice(plugins.agents.resolve, "single_turn_agent").choose(
        agent or "", has_interaction=interaction is not None, has_tools=bool(tools)
    )
    if kind == "gsm8k" and name == "tool_agent" and not tools:
        tools = ("calculator",)
    if kind == "gsm8k" and name == "interaction_agent" and interaction is None:
        interaction = "gsm8k"
    for tool in tools:
        plugins.tools.resolve(tool)
    if interaction is not None:
        plugins.interactions.resolve(interaction)
    if tools and not plugins.agents.get(name).uses_tools:
        raise DataError(f"agent {name!r} uses no tools: remove --tools, or choose another agent with --agent")
    instruction = with_tools(DATA_SETS[kind].instruction, tools) if kind is not None else ""
    return [RowStyle(name, tuple(tools), interaction, instruction if system is None else system, template)]


# ------------------------------------------------------------------------------------------------------- rows


def problem_candidates(
    problems: Iterable[Problem],
    styles: Sequence[RowStyle],
    *,
    data_source: Callable[[Problem], str],
    ability: str,
) -> list[Candidate]:
    """Return the rows of problems, with alternating styles."""
    candidates = []
    for problem in problems:
        row = task_row(
            problem, styles[problem.index % len(styles)], data_source=data_source(problem), ability=ability
        )
        question = normalise(problem.question)
        candidates.append(
            Candidate(row, problem.split, question=question, identity=question, answer=problem.ground_truth)
        )
    return candidates


def write_candidates(
    out_dir: str | Path, candidates: Sequence[Candidate], selection: Selection, schema: pa.Schema
) -> Written:
    """Write `SPLIT.parquet` for each split, atomically. Files of other splits are left unchanged.

    Raises:
        DataError: as `select`. Nothing was written.
    """
    kept, notes = select(candidates, selection)
    counts = {
        split: write_rows(Path(out_dir) / f"{split}.parquet", rows, schema)
        for split, rows in splits_of(kept).items()
    }
    return Written(counts, tuple(notes))


def write_data_set(
    kind: Kind,
    out_dir: str | Path,
    source: OriginalSource,
    *,
    styles: Sequence[RowStyle],
    selection: Selection | None = None,
    data_source: str | None = None,
) -> Written:
    """Write a data set.

    Args:
        selection: None: all rows, in their original splits.
        data_source: None: see `data_source_of`.

    Raises:
        DataError: its files do not exist, or a row cannot be read. Nothing was written.
    """
    known = DATA_SETS[kind]
    problems = [known.read(original) for original in read_originals(open_data_set(kind, source))]
    name = data_source_of(kind, source) if data_source is None else lambda _: data_source
    candidates = problem_candidates(problems, styles, data_source=name, ability=known.ability)
    return write_candidates(out_dir, candidates, selection or Selection(), task_schema(styles))


def write_columns(
    columns: Columns,
    out_dir: str | Path,
    source: OriginalSource,
    *,
    styles: Sequence[RowStyle],
    selection: Selection,
    data_source: str,
    ability: str,
) -> Written:
    """Write a data set of any form; raises as `write_data_set`."""
    problems = [columns.read(original) for original in read_originals(open_originals(source))]
    candidates = problem_candidates(problems, styles, data_source=lambda _: data_source, ability=ability)
    return write_candidates(out_dir, candidates, selection, task_schema(styles))


def filter_rows(file: Path, out: Path, selection: Selection) -> Written:
    """Write the rows of `file` that `selection` keeps to `out`, atomically, with all columns and their types.

    Raises:
        DataError: a row has no prompt of chat messages, a row of JSON would change as Parquet, or no row is
            left. Nothing was written.
    """
    rows = open_rows(str(file))
    places = [RowPlace(str(file), file.stem, index, rows.line(index)) for index in range(len(rows))]
    candidates = list(map(_candidate, rows.rows(len(rows)), places))
    kept, notes = select(candidates, selection)
    order = {id(candidate): index for index, candidate in enumerate(candidates)}
    indices = [order[id(candidate)] for candidate in kept]
    if file.suffix == ".parquet":
        table = pq.read_table(file).take(indices)
    else:
        table = _as_table([candidate.row for candidate in kept], [places[index] for index in indices])
    with appearing_whole(out) as partial:
        pq.write_table(table, partial, compression="zstd")
    return Written({out.stem: len(kept)}, tuple(notes))


def _as_table(rows: Sequence[RawRow], places: Sequence[RowPlace]) -> pa.Table:
    """Return rows of JSON as a table from which the same rows are read.

    Raises:
        DataError: a value would change, such as an integer beyond 64 bits or a null within an object.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: _as_column(rows, places, name) for name in names})
    for row, read, place in zip(rows, read_batch(table, "", 0), places, strict=True):
        for name in names:
            if row.get(name) != read[name]:
                raise place.error(name, f"would change as a Parquet column; {_AS_TEXT}")
    return table


def _as_column(rows: Sequence[RawRow], places: Sequence[RowPlace], name: str) -> pa.Array:
    try:
        return pa.array([row.get(name) for row in rows])
    except (pa.ArrowException, OverflowError) as error:
        for row, place in zip(rows, places, strict=True):
            try:
                pa.array([row.get(name)])
            except (pa.ArrowException, OverflowError) as own:
                raise place.error(name, f"does not fit a Parquet column ({own}); {_AS_TEXT}") from own
        problem = f"column {name!r} has values of different types ({error}); {_AS_TEXT}"
        raise DataError(f"{places[0].file}: {problem}") from error


_AS_TEXT = "store the column as JSON text"


def _candidate(raw: dict, place: RowPlace) -> Candidate:
    prompt = read_list(raw.get("prompt"), place, "prompt")
    question = read_object(raw.get("extra_info"), place, "extra_info").get("question")
    text = normalise(question if isinstance(question, str) else first_user_text(prompt))
    answer = str(read_object(raw.get("reward_model"), place, "reward_model").get("ground_truth"))
    # The whole file counts as train: held-out splits would be exempt from the difficulty filter.
    return Candidate(raw, "train", question=text, identity=text, answer=answer)
