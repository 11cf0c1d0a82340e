"""Checksums within text files: lines that changed or are gone, documents, and files of earlier versions."""

import json

import pytest

from agentrl.errors import CheckpointError
from agentrl.tracking.seals import check_text, checked_lines, read_document, sealed_document, sealed_text
from agentrl.tracking.unwritten import AppendedFile
from agentrl.tracking.versions import read_versions


def write(path, *numbers):
    file = AppendedFile(path)
    file.append_records(*(json.dumps({"n": number}).encode() for number in numbers))
    file.close()


def numbers(path):
    return [json.loads(line)["n"] for line in checked_lines(path)]


def test_lines_go_on_where_a_killed_process_cut_one_off(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 0}\n')  # as an earlier version wrote it
    write(path, 1, 2)
    with path.open("a") as file:
        file.write('{"n": 3, "c')
    assert numbers(path) == [0, 1, 2]
    write(path, 3)
    assert numbers(path) == [0, 1, 2, 3]


@pytest.mark.parametrize("line", range(4))
def test_a_line_that_is_cut_out_changed_or_put_elsewhere_is_found(tmp_path, line):
    path = tmp_path / "a.jsonl"
    write(path, *range(5))
    lines = path.read_bytes().splitlines(keepends=True)
    others = lines[:line] + lines[line + 1 :]
    changed = lines[line].replace(b'"n": ', b'"n":1')
    for damaged in (others, [*others[:line], changed, *others[line:]], [*others, lines[line]]):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(CheckpointError, match=r"a\.jsonl, line \d is damaged"):
            numbers(path)


def test_a_document_and_a_text_that_were_changed_are_found(tmp_path):
    path = tmp_path / "a"
    path.write_text(sealed_document({"step": 4, "b": [1.5, None]}))
    assert read_document(path) == {"step": 4, "b": [1.5, None]}
    path.write_text(path.read_text().replace("4", "5", 1))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        read_document(path)
    for content, words in ((b"[" * 9999, "damaged"), (b"\xff", "damaged"), (b"[]", "contains a list")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            read_document(path)
    path.write_text(sealed_text("a: 1\nb: 2\n"))
    check_text(path)
    sealed = path.read_text()
    for changed in (sealed.replace("b: 2\n", ""), f"{'[' * 2000}\n{sealed}"):
        path.write_text(changed)
        with pytest.raises(CheckpointError, match="was changed after the run wrote it"):
            check_text(path)
    path.write_text("a: 1\n")
    check_text(path)


@pytest.mark.parametrize(
    "line", ["null", "[]", '{"version": "7"}', '{"version": 7, "step": true, "what": "a"}']
)
def test_a_line_of_versions_that_is_none_is_named(tmp_path, line):
    path = tmp_path / "versions.jsonl"
    path.write_text(f'{{"version": 1, "step": 0, "what": "policy"}}\n{line}\n')
    with pytest.raises(CheckpointError, match=r"versions\.jsonl, line 2: no record of a version"):
        read_versions(path)
