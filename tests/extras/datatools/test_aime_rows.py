"""AIME's problems become rows."""

from __future__ import annotations

import orjson
import pyarrow.parquet as pq
import pytest

from agentrl.errors import DataError
from parts.converted import write_aime


def test_rows_of_aime(tmp_path):
    lines = [
        {"id": "I-1", "problem": "What is 2 + 2?", "answer": "004"},
        {"problem": "And 30 * 30?", "answer": 900},
    ]
    (tmp_path / "aime_1.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    assert write_aime(tmp_path / "out", tmp_path) == {"aime_1": 2}
    first, second = pq.read_table(tmp_path / "out" / "aime_1.parquet").to_pylist()
    assert [message["content"] for message in first["prompt"]][1:] == ["What is 2 + 2?"]
    assert (first["data_source"], first["reward_model"]["ground_truth"], first["extra_info"]["id"]) == (
        "aime_1",
        "004",
        "I-1",
    )
    assert (second["reward_model"]["ground_truth"], second["extra_info"]["index"]) == ("900", 1)


@pytest.mark.parametrize("answer", ["1000", "-1", "2.5", "", "x", None, True, "9" * 5000])
def test_an_answer_that_aime_cannot_have(tmp_path, answer):
    (tmp_path / "aime_1.jsonl").write_bytes(orjson.dumps({"problem": "What?", "answer": answer}))
    with pytest.raises(DataError, match=r"line 1\): needs a `problem` and an `answer` from 0 to 999"):
        write_aime(tmp_path / "out", tmp_path)
    assert not (tmp_path / "out" / "aime_1.parquet").exists()


def test_a_folder_without_problems(tmp_path):
    with pytest.raises(DataError, match="has no data"):
        write_aime(tmp_path / "out", tmp_path)
