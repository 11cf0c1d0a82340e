"""The exported file: self-contained, small, and safe whatever is in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.data.trajectories import encode, write_parquet
from agentrl.errors import DataError
from agentrl.extras.view.app import Pages
from agentrl.extras.view.attempts import Filters
from agentrl.extras.view.export import MAX_BYTES, bundle, export, question
from agentrl.extras.view.sources import open_sources
from agentrl.types import Message
from parts.trajectories import make_trajectory
from parts.viewed import write_run

HOSTILE = (
    "</script><script>alert(1)</script><!-- ]]> \u2028 &lt; \u202e \x1b[31m <img src=x onerror=alert(1)>"
)


def answers_of(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="answers">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    held: dict[str, dict[str, object]] = json.loads(found[1])
    return held["answers"]


def test_the_file_answers_what_its_page_asks(tmp_path: Path) -> None:
    stored = write_run(tmp_path / "run")
    pages = Pages(open_sources([tmp_path / "run"]))
    count, num_bytes = export(pages, tmp_path / "e.html", filters=Filters(), limit=500)
    text = (tmp_path / "e.html").read_text()
    assert (count, num_bytes) == (len(stored), len(text.encode()))
    answers = answers_of(text)
    rows = answers[question("attempts", source=0, offset=0, limit=50)]["rows"]
    assert [row["key"] for row in rows] == [one.key for one in stored]
    for one in stored:
        shown = answers[question("attempt", source=0, key=one.key)]
        if one.trajectory is not None:
            assert [m["content"]["text"] for m in shown["messages"]] == [
                m.content for m in one.trajectory.messages
            ]
            tokens = answers[question("tokens", source=0, key=one.key, start=0, count=4000)]
            assert tokens["ids"] == one.trajectory.token_ids.tolist()
    assert answers[question("series", source=0, kind="train")]["steps"] == [1, 2, 3]
    assert str(tmp_path) not in text, "a reader elsewhere does not learn where the run was"


def test_nothing_in_it_ends_its_data_or_runs(tmp_path: Path) -> None:
    own = make_trajectory(
        [-1, 0], messages=(Message("user", HOSTILE), Message("assistant", HOSTILE)), task_id=HOSTILE
    )
    write_parquet(tmp_path / "a.parquet", encode([own]))
    export(Pages(open_sources([tmp_path])), tmp_path / "e.html", filters=Filters(), limit=1)
    text = (tmp_path / "e.html").read_text()
    assert re.findall(r"</?script[^>]*>", text) == [
        '<script type="application/json" id="answers">',
        "</script>",
        '<script type="module">',
        "</script>",
    ]
    assert "onerror=alert" not in re.sub(
        r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL
    )
    assert "<" not in text.split('id="answers">')[1].split("</script>")[0]
    shown = answers_of(text)[question("attempt", source=0, key="a.parquet:0")]
    assert shown["messages"][1]["content"]["text"] == HOSTILE


def test_its_policy_allows_its_own_script_and_style_only(tmp_path: Path) -> None:
    write_run(tmp_path)
    export(Pages(open_sources([tmp_path])), tmp_path / "e.html", filters=Filters(), limit=1)
    text = (tmp_path / "e.html").read_text()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    for kind, form in (
        ("script", r'<script type="module">(.*?)</script>'),
        ("style", r"<style>(.*?)</style>"),
    ):
        (code,) = re.findall(form, text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []


def test_modules_are_one_script_without_imports() -> None:
    script = bundle()
    assert re.findall(r"^\s*(import|export) ", script, re.MULTILINE) == []
    for name in ("dom", "app"):
        assert f'modules["{name}"] = await' in script


def test_long_attempts_are_cut_until_the_file_fits(tmp_path: Path) -> None:
    """200 attempts of 3,000 tokens and long messages would take 40 MB."""
    said = "so it is " * 5000
    made = [
        make_trajectory(
            [-1] + [0] * 3000, group_id=g, messages=(Message("user", "q"), Message("assistant", said))
        )
        for g in range(200)
    ]
    write_parquet(tmp_path / "a.parquet", encode(made))
    count, num_bytes = export(
        Pages(open_sources([tmp_path])), tmp_path / "e.html", filters=Filters(), limit=200
    )
    assert (count, num_bytes <= MAX_BYTES) == (200, True)
    answers = answers_of((tmp_path / "e.html").read_text())
    tokens = answers[question("tokens", source=0, key="a.parquet:7", start=0, count=4000)]
    shown = answers[question("attempt", source=0, key="a.parquet:7")]["messages"][1]["content"]
    assert 0 < len(tokens["ids"]) < tokens["total"] == 3001
    assert (said.startswith(shown["text"]), shown["chars"]) == (True, len(said))


def test_the_command_writes_what_passes_the_filter(tmp_path: Path) -> None:
    stored = write_run(tmp_path / "run")
    wanted = [one for one in stored if one.step == 2 and one.set == "training"]
    out = tmp_path / "e.html"
    done = CliRunner().invoke(
        app, ["view", str(tmp_path / "run"), "--export", str(out), "--filter", "step:2 set:training"]
    )
    assert (done.exit_code, done.stdout.startswith(f"wrote {out}: {len(wanted)} attempts, ")) == (0, True)
    few = CliRunner().invoke(app, ["view", str(tmp_path / "run"), "--export", str(out), "--limit", "2"])
    assert ": 2 attempts" in few.stdout


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("step:40 outcome:truncated,aborted", {"step": "40", "outcome": "truncated,aborted"}),
        ('failure:"ran out" one "two words"', {"failure": "ran out", "text": "one two words"}),
        ("colour:red task:train:17", {"text": "colour:red", "task": "train:17"}),
        ("", {}),
    ],
)
def test_a_line_of_filters_is_read_as_the_page_reads_it(line: str, same: dict[str, str]) -> None:
    assert Filters.parse_line(line) == Filters.parse(same)


def test_nothing_to_export_is_said(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", encode([make_trajectory([-1, 0])]))
    with pytest.raises(DataError, match="no attempt passes the filters"):
        export(
            Pages(open_sources([tmp_path])),
            tmp_path / "e.html",
            filters=Filters.parse({"task": "x"}),
            limit=1,
        )
