"""GSM8K and AIME as `agentrl data` writes them, from folders of their original files."""

from __future__ import annotations

from pathlib import Path

from agentrl.extras.datatools.convert import choose_styles, write_data_set
from agentrl.extras.datatools.originals import OriginalSource


def write_gsm8k(
    out_dir: str | Path, source_dir: str | Path, *, agent: str = "single_turn_agent"
) -> dict[str, int]:
    """Write `train.parquet` and `test.parquet` from GSM8K's `train.jsonl` and `test.jsonl`.

    Returns rows per split. `agent` plays every row; with `mixed`, the three built-in agents alternate.

    Raises:
        DataError: a source file is missing, or a line is not `{question, answer}` with an answer after
            `####`.
    """
    return dict(
        write_data_set(
            "gsm8k", out_dir, OriginalSource(source_dir), styles=choose_styles("gsm8k", agent=agent)
        ).rows
    )


def write_aime(out_dir: str | Path, source_dir: str | Path) -> dict[str, int]:
    """Write a Parquet file of the same name for each file of `source_dir`; return rows per file.

    Raises:
        DataError: the folder has no data file, or a row has no problem, or its answer is not an integer from
            0 to 999.
    """
    return dict(
        write_data_set("aime", out_dir, OriginalSource(source_dir), styles=choose_styles("aime")).rows
    )
