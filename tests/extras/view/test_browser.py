"""The page in a real browser: what a person sees, by pointer and by keys, at two sizes; what must not run.

One browser for all tests of the file; each has a fresh profile. Nothing is timed: a test waits for what it
wants to see.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.data.proximal_files import ProximalRun, write_proximal
from agentrl.data.trajectories import encode, write_parquet
from agentrl.extras.view.app import Pages
from agentrl.extras.view.attempts import Filters
from agentrl.extras.view.export import export
from agentrl.extras.view.sources import open_sources
from agentrl.tracking.metrics import StepRecord
from agentrl.types import Message, Outcome
from parts.browser import Tab, launched, served
from parts.trajectories import make_trajectory
from parts.viewed import HOSTILE, Stored, write_hostile, write_run

AXE = files("axe_playwright_python") / "axe.min.js"
NEWEST = "trajectories/step_000004.parquet:0"
VIEWS = ("conversation", "tokens", "group", "facts")
PLACES = [
    "#/run",
    "#/attempts",
    *(f"#/attempt?source=0&key={NEWEST}&tab={view}" for view in VIEWS),
    "#/compare",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Stored]]:
    folder = tmp_path_factory.mktemp("seen")
    stored = write_run(folder / "first", steps=4, groups=3)
    write_run(folder / "second", seed=1, steps=4, groups=3)
    (folder / "second" / "config.yaml").write_text("trainer: {steps: 9}\nbuffer: {max_staleness: 1}\n")
    return [folder / "first", folder / "second"], stored


@pytest.fixture(scope="module")
def address(browser: Any, runs) -> Iterator[str]:
    with served(runs[0]) as found:
        yield found


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Callable[..., Tab]]:
    """Return a function that opens a tab; at the end no tab may have complained."""
    opened: list[Tab] = []

    def new(width: int = 1280, place: str | None = None, **options: Any) -> Tab:
        context = browser.new_context(viewport={"width": width, "height": 844}, **options)
        context.set_default_timeout(60_000)
        opened.append(Tab(context.new_page(), address if place is None else place))
        return opened[-1]

    yield new
    for one in opened:
        one.page.context.close()
        assert one.complaints == []


def test_a_run_is_shown_and_a_link_leads_to_each_place(tab, runs) -> None:
    seen = tab()
    seen.open("#/run")
    assert seen.page.title() == "first · agentrl view"
    assert seen.texts("h1") == ["first"]
    assert "Reward" in seen.texts(".card h2")
    assert seen.page.locator("svg[role=img]").count() >= 2
    actor = seen.page.locator(".card:has(h2:has-text('Rollout actors')) tbody tr").all_inner_texts()
    assert [cell.split() for cell in actor] == [["rollout-0-5f3a9c1e", "ended", "7", "30", "1"]]
    seen.page.locator("nav a", has_text="Attempts").click()
    seen.drawn("#/attempts")
    assert seen.texts("#count") == [f"1–{min(50, len(runs[1]))} of {len(runs[1])} attempts"]


def test_attempts_are_filtered_opened_and_left_by_keys(tab, runs) -> None:
    wanted = [
        s
        for s in runs[1]
        if s.trajectory and s.trajectory.outcome is Outcome.TRUNCATED and s.set == "training"
    ]
    seen = tab()
    seen.open("#/attempts")
    seen.press("/")
    seen.page.keyboard.type("outcome:truncated set:training")
    seen.press("Enter")
    seen.drawn("#/attempts?source=0&f.outcome=truncated")
    assert seen.texts("#count") == [f"1–{len(wanted)} of {len(wanted)} attempts"]
    assert set(seen.texts("tbody .pill")) == {"truncated"}
    seen.press("j", "j", "Enter")
    seen.drawn("#/attempt?")
    shown = wanted[1].trajectory
    assert seen.texts("h1") == [shown.task_id]
    assert f"group {shown.group_id}, member {shown.member}" in seen.texts("main")[0]
    seen.press("k")
    seen.page.wait_for_selector(
        f"text=group {wanted[0].trajectory.group_id}, member {wanted[0].trajectory.member}"
    )
    seen.press("u")
    seen.drawn("#/attempts")
    assert seen.page.locator("#filter").input_value() == "outcome:truncated set:training"
    seen.press("?")
    assert seen.page.locator("dialog[open]").count() == 1
    seen.press("Escape")
    assert seen.page.locator("dialog[open]").count() == 0


def test_tokens_are_all_there_and_tell_their_numbers(tab, runs) -> None:
    own = runs[1][0].trajectory
    seen = tab()
    seen.open(f"#/attempt?source=0&key={NEWEST}&tab=tokens")
    spans = seen.page.locator(".tokens [data-at]")
    assert seen.texts(".tokens [data-at]") == [str(token) for token in own.token_ids.tolist()], (
        "no tokenizer: ids"
    )
    assert seen.page.locator(".tokens .m1").count() == own.num_action_tokens
    sampled = int(np.flatnonzero(own.action_mask)[0])
    spans.nth(sampled).hover()
    told = dict(zip(seen.texts(".tip dt"), seen.texts(".tip dd"), strict=True))
    assert float(told["log-probability"]) == pytest.approx(float(own.behavior_logprobs[sampled]), rel=1e-3)
    assert told["version"] == str(own.versions[sampled])
    seen.page.locator("button", has_text="lag").click()
    assert seen.page.locator(".tokens .m1").count() == 0
    seen.page.locator(".tokens").focus()
    seen.press("ArrowRight", "ArrowRight")
    assert seen.texts(".tip dd")[0] == "1"


def test_tokens_are_coloured_by_their_importance_ratio(tab, tmp_path: Path, browser) -> None:
    own = write_run(tmp_path, steps=4)[0].trajectory
    logprobs = own.behavior_logprobs[own.action_mask].copy()
    logprobs[0] += 1.0
    run = ProximalRun(own.group_id, own.member, 0, logprobs)
    write_proximal(tmp_path / "proximal", [run], step=4, part=0, rank=0)
    with served([tmp_path]) as place:
        seen = tab(place=place)
        seen.open(f"#/attempt?source=0&key={NEWEST}&tab=tokens")
        seen.page.locator("button", has_text="importance ratio").click()
        assert seen.page.locator(".tokens .p3").count() == 1
        assert seen.page.locator(".tokens .z").count() == own.num_action_tokens - 1
        seen.page.locator(".tokens .p3").hover()
        told = dict(zip(seen.texts(".tip dt"), seen.texts(".tip dd"), strict=True))
        assert float(told["proximal / behavior"]) == pytest.approx(np.e, rel=1e-3)
        seen.page.goto("about:blank")


def test_two_runs_are_beside_each_other(tab) -> None:
    seen = tab()
    seen.open("#/compare")
    assert seen.texts("td.mono") == ["buffer.max_staleness", "2", "1"]
    assert seen.texts(".card h2")[0] == "Reward"


def test_a_new_step_appears_by_itself(tab, tmp_path: Path, browser) -> None:
    write_run(tmp_path)
    with served([tmp_path]) as place:
        seen = tab(place=place)
        seen.open("#/run")
        assert seen.texts(".figures dd")[0].startswith("3")
        with (tmp_path / "metrics.jsonl").open("ab") as file:
            file.write(StepRecord("train", 7, 8, 20.0, {"rollout/reward_mean": 0.9}).to_line())
        seen.page.wait_for_selector(".figures dd >> text=/^7/")
        seen.page.goto("about:blank")


def test_what_a_model_wrote_is_shown_and_never_runs(tab, tmp_path: Path, browser) -> None:
    write_hostile(tmp_path)
    with served([tmp_path]) as place:
        seen = tab(place=place)
        asked: list[str] = []
        seen.page.on("request", lambda request: asked.append(request.url))
        for name in ("run", "attempts"):
            seen.open(f"#/{name}")
        for view in VIEWS:
            seen.open(f"#/attempt?source=0&key=trajectories/step_000009.parquet:0&tab={view}")
            assert seen.page.locator("main script, main img, main base, main iframe").count() == 0
            if view == "conversation":
                text = seen.page.locator(".turn.user .said").inner_text()
                assert text == HOSTILE[0], "it is there, as text"
                said = seen.page.locator(".turn.assistant").inner_text()
                assert "\\x1b[31mred" in said
                assert "\\u202e" in said
                assert "\x1b" not in said
                assert "\u202e" not in said
        assert seen.page.evaluate("window.hacked") is None
        assert {url.split("/")[2] for url in asked} == {place.split("/")[2]}, (
            "nothing else was asked for anything"
        )
        seen.page.goto("about:blank")


def test_a_script_that_got_into_the_page_does_not_run(tab) -> None:
    """The last wall: even code that adds elements cannot add code."""
    seen = tab()
    seen.open("#/run")
    hacked = "{textContent: 'window.hacked = 1'}"
    for way in (
        f"document.body.append(Object.assign(document.createElement('script'), {hacked}))",
        "document.body.innerHTML = '<img src=x onerror=\"window.hacked = 1\">'",
        "document.body.append(Object.assign(document.createElement('img'), {src: 'http://127.0.0.1:9/x.png'}))",
        "document.body.setAttribute('onclick', 'window.hacked = 1') ?? document.body.click()",
    ):
        with seen.page.expect_event("console"):
            seen.page.evaluate(
                f"() => {{ try {{ {way} }} catch (error) {{ console.error(error.message) }} }}"
            )
    assert seen.page.evaluate("window.hacked") is None
    seen.complaints.clear()


def test_ten_megabytes_of_one_token_are_looked_at_in_parts(tab, tmp_path: Path, browser) -> None:
    count = 200_000
    made = make_trajectory(
        [-1] + [0] * count, messages=(Message("user", "?"), Message("assistant", "a" * 10_000_000))
    )
    write_parquet(tmp_path / "a.parquet", encode([made]))
    with served([tmp_path]) as place:
        seen = tab(place=place)
        seen.open("#/attempt?source=0&key=a.parquet:0")
        assert len(seen.page.locator(".turn.assistant .said").inner_text()) == 20_000
        seen.page.locator("button", has_text="show more of 10,000,000 characters").click()
        seen.page.locator("[role=tab]", has_text="Tokens").click()
        seen.drawn("#/attempt?source=0&key=a.parquet%3A0&tab=tokens")
        assert seen.page.locator(".tokens [data-at]").count() == 4000
        seen.page.goto("about:blank")


def test_nothing_is_wider_than_a_telephone(tab) -> None:
    seen = tab(width=390)
    for place in PLACES:
        seen.open(place)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390, place


@pytest.mark.parametrize("width", [390, 1280])
def test_no_figure_is_cut_and_the_reward_is_in_view(tab, width: int) -> None:
    seen = tab(width=width)
    seen.open("#/run")
    cut = "all => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
    assert seen.page.locator(".figures dd, .figures small").evaluate_all(cut) == []
    seen.open("#/attempts?source=0")
    heads = {head.inner_text(): head.bounding_box() for head in seen.page.locator("th").all()}
    for name in ("outcome", "reward"):
        assert heads[name]["x"] + heads[name]["width"] <= width


def test_an_exported_file_needs_nobody(tab, tmp_path: Path, runs) -> None:
    folders, stored = runs
    count, _ = export(Pages(open_sources(folders[:1])), tmp_path / "e.html", filters=Filters(), limit=60)
    assert count == len(stored)
    seen = tab(place=f"file://{tmp_path}/e.html", offline=True)
    asked: list[str] = []
    seen.page.on("request", lambda request: asked.append(request.url))
    seen.open("#/run")
    assert seen.page.locator("svg[role=img]").count() >= 2
    seen.page.locator("nav a", has_text="Attempts").click()
    seen.drawn("#/attempts")
    assert seen.texts("tbody tr td:first-child")[0] == "4"
    seen.press("j", "Enter")
    seen.drawn("#/attempt?")
    for view in ("Tokens", "Group", "Facts"):
        seen.page.locator("[role=tab]", has_text=view).click()
        seen.drawn(
            f"#/attempt?source=0&key={NEWEST.replace('/', '%2F').replace(':', '%3A')}&at=0&tab={view.lower()}"
        )
        assert seen.page.locator("text=That did not work").count() == 0
    assert [url for url in asked if not url.startswith("file://")] == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_used_without_a_mouse_or_sharp_eyes(tab, scheme: str) -> None:
    """axe-core finds nothing serious: names of controls, contrast, structure. The policy is off here, because
    axe is not the page's own script.
    """
    seen = tab(bypass_csp=True, color_scheme=scheme)
    axe = AXE.read_text()
    for place in PLACES:
        seen.open(place)
        seen.page.add_script_tag(content=axe)
        found = seen.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert len(found["passes"]) > 10, "it looked at the page"
        serious = {
            rule["id"]: [node["html"][:200] for node in rule["nodes"]][:3]
            for rule in found["violations"]
            if rule["impact"] in ("serious", "critical")
        }
        assert serious == {}, (place, json.dumps(serious, indent=1))
