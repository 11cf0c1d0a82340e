"""The page in a real browser beside a real run: opened before the first step, it follows to the end."""

from __future__ import annotations

import pytest

from parts.browser import Tab, launched, served


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_follows_a_run_by_itself(world):
    run_dir = world.folder / "watched"
    with launched() as browser:  # first: its start may take longer than that of the run
        page = browser.new_page()
        page.set_default_timeout(400_000)
        run = world.start("train", str(world.config), f"trainer.run_dir={run_dir}", "trainer.steps=4")
        run.wait_until(lambda: (run_dir / "config.yaml").exists(), timeout_s=300)
        with served([run_dir]) as address:
            seen = Tab(page, address)
            seen.open("#/run")
            page.evaluate("window.isTheSame = true")
            page.wait_for_selector("[role=progressbar][aria-valuenow='0']")
            page.wait_for_selector("h2:has-text('Rollout actors')")
            assert run.wait(400) == 0, run.output()
            assert f"look at it: agentrl view {run_dir}" in run.output()
            page.wait_for_selector("main >> text=ended")
            page.wait_for_selector("[role=progressbar][aria-valuenow='100']")
            assert page.evaluate("window.isTheSame"), "it was never loaded again"
            actors = page.locator(".card:has(h2:has-text('Rollout actors')) tbody tr").all_inner_texts()
            assert [actor.split()[0].startswith("rollout-0-") for actor in actors] == [True]
            seen.page.locator("nav a", has_text="Attempts").click()
            page.wait_for_selector("#count:has-text('attempts')")
            page.goto("about:blank")
            assert seen.complaints == []
