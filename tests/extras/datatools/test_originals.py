"""Original files of public data sets: which files, which split, what each row says, and what is said about a
row that says nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data.row_place import RowPlace
from agentrl.errors import DataError
from agentrl.extras.answers.boxed import last_boxed
from agentrl.extras.datatools.code_problems import read_code
from agentrl.extras.datatools.originals import (
    Original,
    OriginalSource,
    open_originals,
    read_originals,
    split_of,
)
from agentrl.extras.datatools.problems import Columns, boxed_answer, read_aime, read_gsm8k, read_math
from agentrl.extras.sandbox.code_cases import Cases, read_cases


def original(**raw) -> Original:
    return Original(raw, RowPlace("f.jsonl", "f", 4, 5), "train", 4)


def write_lines(path: Path, *rows: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    return path


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train.jsonl", "train"),
        ("main/test-00000-of-00001.parquet", "test"),
        ("data/train-00003-of-00010-0123456789abcdef.parquet", "train"),
        ("main/train/0000.parquet", "train"),
        ("main/partial-train/0000.parquet", "train"),
        ("train/algebra/17.json", "train"),
        ("aime_2024.jsonl", "aime_2024"),
        ("data/problems.parquet", "problems"),
    ],
)
def test_the_split_of_a_file(path, split):
    assert split_of(Path("/train/somewhere") / path, Path("/train/somewhere")) == split


def test_shards_of_a_split_follow_one_another_and_descriptions_are_no_data(tmp_path):
    for shard in range(3):
        table = pa.table({"n": [3 * shard, 3 * shard + 1, 3 * shard + 2]})
        (tmp_path / "main").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / f"main/train-0000{shard}-of-00003.parquet")
    write_lines(tmp_path / "main" / "test.jsonl", {"n": 0}, {"n": 1})
    write_lines(tmp_path / "other" / "test.jsonl", {"n": 7})
    (tmp_path / "dataset_infos.json").write_text("{}")
    rows = list(read_originals(open_originals(OriginalSource(tmp_path, subset="main"))))
    assert [(row.index, row.raw["n"]) for row in rows if row.split == "train"] == [(n, n) for n in range(9)]
    assert [(row.index, row.place.line) for row in rows if row.split == "test"] == [(0, 1), (1, 2)]
    assert len(list(read_originals(open_originals(OriginalSource(tmp_path, split="test"))))) == 3


def test_a_folder_with_data_at_its_top_is_read_alone(tmp_path):
    write_lines(tmp_path / "train.jsonl", {"n": 1})
    write_lines(tmp_path / "backup" / "train.jsonl", {"n": 2})
    assert [row.raw["n"] for row in read_originals(open_originals(OriginalSource(tmp_path)))] == [1]


def test_json_comes_as_lines_as_a_list_and_as_one_object(tmp_path):
    (tmp_path / "lines.json").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / "list.json").write_text('[\n {"n": 3},\n {"n": 4}\n]')
    (tmp_path / "one.json").write_text('{\n "n": 5\n}')
    assert [row.raw["n"] for row in read_originals(open_originals(OriginalSource(tmp_path)))] == [
        1,
        2,
        3,
        4,
        5,
    ]
    (tmp_path / "list.json").write_text("[3]")
    with pytest.raises(DataError, match=r"list\.json: row 0: must be a JSON object, is int"):
        list(read_originals(open_originals(OriginalSource(tmp_path))))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (OriginalSource("./nowhere"), "no such file or folder, and not a hub id"),
        (OriginalSource("a/b/c"), "not a hub id either"),
        (OriginalSource("here"), "'here' has no data: no .parquet, .jsonl, .json file"),
        (OriginalSource("filled", subset="main"), "'filled' has no subset (folder) 'main'"),
        (OriginalSource("filled", split="dev"), "'filled' has no split 'dev'; it has train, test"),
    ],
)
def test_what_is_not_there_is_one_line(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for split in ("train", "test"):
        write_lines(tmp_path / "filled" / split / "a.jsonl", {"n": 1})
    with pytest.raises(DataError) as error:
        open_originals(source)
    assert message in str(error.value).replace("test, train", "train, test")
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------- problems


def test_both_forms_of_aime_are_the_same_problems():
    ours = read_aime(original(id="60", problem="Find $x$.", answer="073"))
    theirs = read_aime(original(ID="2024-I-3", Problem="Find $x$.", Solution="It is 73.", Answer=73))
    assert (ours.question, ours.ground_truth, ours.id, ours.solution) == ("Find $x$.", "073", "60", "")
    assert (theirs.question, theirs.ground_truth, theirs.id, theirs.solution) == (
        "Find $x$.",
        "73",
        "2024-I-3",
        "It is 73.",
    )


def test_math_and_math_500():
    old = read_math(
        original(problem="P?", solution=r"So $\boxed{\frac{1}{2}}$.", level="Level 5", type="Algebra")
    )
    new = read_math(
        original(
            problem="P?",
            solution="...",
            answer=r"\frac{1}{2}",
            level=5,
            subject="Algebra",
            unique_id="test/a/1.json",
        )
    )
    assert (old.ground_truth, old.difficulty, old.subject, old.id) == (
        r"\frac{1}{2}",
        "Level 5",
        "Algebra",
        "4",
    )
    assert (new.ground_truth, new.difficulty, new.subject, new.id) == (
        r"\frac{1}{2}",
        "Level 5",
        "Algebra",
        "test/a/1.json",
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{\left\{2, \{3\}\right\}}", r"\left\{2, \{3\}\right\}"),
        (r"so $\boxed 7$, done", "7"),
        (r"so \boxed3.", "3"),
        (r"\fbox{x^{2}}", "x^{2}"),
        (r"\boxed{4} and \boxed{never closed", "4"),
        ("no box", None),
    ],
)
def test_the_answer_in_the_box(text, answer):
    assert boxed_answer(text) == answer


@given(st.lists(st.sampled_from([r"\boxed{", "{", "}", "x", r"\{", r"\}", " "]), max_size=20).map("".join))
def test_a_closed_box_is_the_one_that_the_reward_reads(text):
    assert boxed_answer(text) == last_boxed(text)


@pytest.mark.parametrize(
    ("raw", "cases"),
    [
        (
            {"question": "Q", "input_output": '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'},
            Cases(None, ("1\n",), ("2\n",)),
        ),
        ({"prompt": "Q", "test_cases": [{"input": "1", "output": "2"}]}, Cases(None, ("1",), ("2",))),
        (
            {"prompt": "Q", "ground_truth": {"inputs": [[1]], "outputs": [2], "fn_name": "f"}},
            Cases("f", ([1],), (2,)),
        ),
        (
            {"prompt": "Q", "test": "def check(f): ...", "entry_point": "f"},
            Cases(asserts=("def check(f): ...\n\ncheck(f)",)),
        ),
        (
            {"text": "Q", "test_list": ["assert f(1)"], "test_setup_code": "import m"},
            Cases(asserts=("import m\nassert f(1)",)),
        ),
        (
            {"prompt": "Q", "tests": ["assert f(1)", "assert f(2)"]},
            Cases(asserts=("assert f(1)", "assert f(2)")),
        ),
    ],
)
def test_cases_become_what_the_reward_reads(raw, cases):
    problem = read_code(original(**raw))
    assert problem.question == "Q"
    assert read_cases(problem.ground_truth) == cases


def test_columns_of_any_data_set():
    columns = Columns("q", "a", difficulty="d", id="name")
    problem = columns.read(original(q=[{"role": "user", "content": "Q?"}], a=["x", 1], d=3, name="n-1"))
    assert (problem.question, problem.ground_truth, problem.difficulty, problem.id) == (
        "Q?",
        '["x", 1]',
        "3",
        "n-1",
    )
    unknown = columns.read(original(q="Q?", a="4", d=None, name=None))
    assert (unknown.ground_truth, unknown.difficulty, unknown.id) == ("4", "", "4")
    assert Columns("q", None).read(original(q="Q?")).ground_truth == ""


@pytest.mark.parametrize(
    ("read", "raw", "message"),
    [
        (
            read_gsm8k,
            {"question": "Q", "answer": "4"},
            "needs `question` and an `answer` that ends with `#### number`",
        ),
        (read_gsm8k, {"question": " ", "answer": "#### 4"}, "has an empty question"),
        (
            read_aime,
            {"problem": "Q", "answer": "1000"},
            "needs a `problem` and an `answer` from 0 to 999 (got '1000')",
        ),
        (
            read_math,
            {"problem": "Q", "solution": "nothing boxed"},
            "needs a `problem` and an `answer`, or a `solution` with one",
        ),
        (read_code, {"prompt": "Q"}, "needs test cases"),
        (read_code, {"tests": ["x"]}, "needs the task as text"),
        (read_code, {"prompt": "Q", "tests": "{"}, "field 'tests': is not valid JSON"),
        (
            read_code,
            {"prompt": "Q", "tests": {"inputs": [1], "outputs": []}},
            "field 'tests': must have as many `inputs` as `outputs`",
        ),
        (read_code, {"prompt": "Q", "tests": [1]}, "field 'tests': must be a list of Python code strings"),
        (Columns("q", "a").read, {"q": "Q", "b": 1}, "field 'a': is missing; the row has q, b"),
        (Columns("q", "a").read, {"q": "Q", "a": None}, "field 'a': is null"),
        (
            Columns("q", None).read,
            {"q": 3},
            "field 'q': must be text, or chat messages with exactly one user message, is '3'",
        ),
        (
            Columns("q", None).read,
            {"q": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]},
            "field 'q': must be text, or chat messages with exactly one user message",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_named(read, raw, message):
    with pytest.raises(DataError) as error:
        read(original(**raw))
    assert str(error.value).startswith("f.jsonl: row 4 (line 5): ")
    assert message in str(error.value)
    assert "\n" not in json.loads(json.dumps(str(error.value)))
