"""The chat templates of real models, all that ship in trl, on a real vocabulary: they append, or the
conversation forks.
"""

import importlib.util
import itertools
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat.chat import Chat
from agentrl.chat.formats import NO_FORMAT
from agentrl.chat.probes import PROBE_TOOLS, ProbeScope, generate
from agentrl.chat.replay import ReplayedStep, replay_steps
from agentrl.chat.template import TemplateRefusal

FILE = Path(__file__).parents[2] / "chat" / "templates" / "trl_templates.py"
EXAMPLES = 35 * max(1, settings().max_examples // 100)
"""Per template; `--hypothesis-profile=more` multiplies it."""


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


trl_templates = load(FILE)


def verdicts() -> dict[str, list[str]]:
    """The table in docs/templates.md: template -> verdict with tools and without."""
    text = (
        trl_templates.DOCUMENT.read_text().partition(trl_templates.BEGIN)[2].partition(trl_templates.END)[0]
    )
    rows = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("| ")]
    return {
        name: [cell.strip() for cell in cells[3:5]]
        for cells in rows
        if cells[1].strip() != "templates"
        for name in cells[1].strip().split(", ")
    }


def verdict_of(name: str) -> str:
    """With tools, where their calls are read."""
    with_tools, without = verdicts()[name]
    return without if with_tools in ("not read", "not shown") else with_tools


USABLE = [name for name in verdicts() if verdict_of(name) in ("exact", "forks")]


@cache
def chat_of(name: str) -> Chat:
    return trl_templates.chat_for(trl_templates.sources()[name])


def scope_of(chat: Chat) -> ProbeScope:
    tools = PROBE_TOOLS if chat.tool_format != NO_FORMAT else ()
    renderer = chat._renderer
    thinks, control = renderer.style.knows_thoughts, renderer.codec.special_tokens
    return ProbeScope(tools, thinks=thinks, has_user_turns=True, has_system=True, control=control)


def until_refused(steps: Iterator[ReplayedStep]) -> Iterator[ReplayedStep]:
    try:
        yield from steps
    except TemplateRefusal:
        return  # roles that this template does not know


@pytest.mark.slow
def test_the_table_of_verdicts_is_up_to_date():
    assert trl_templates.DOCUMENT.read_text() == trl_templates.written(), "write it anew: make templates"


def test_every_template_of_trl_has_a_verdict():
    assert set(verdicts()) == set(trl_templates.sources())
    assert {cell for cells in verdicts().values() for cell in cells} <= {
        "exact",
        "forks",
        "broken",
        "not read",
        "not shown",
    }
    assert set(verdicts()) - set(USABLE) == {
        *("muse_glimmer", "muse_glimmer_training"),
        *("diffusion_gemma", "diffusion_gemma_training"),
    }
    assert len(USABLE) * 35 >= 2000


@pytest.mark.parametrize("name", USABLE)
@settings(max_examples=EXAMPLES)
@given(seed=st.integers(0, 2**32))
def test_rows_grow_by_what_the_template_shows_and_by_what_was_sampled(name, seed):
    chat, may_fork = chat_of(name), verdict_of(name) == "forks"
    renderer, scope = chat._renderer, scope_of(chat)
    row: list[int] = []
    for step in until_refused(replay_steps(renderer, generate(random.Random(seed), scope), scope.tools)):
        if step.edit is not None:
            assert may_fork, step.edit
            row = []
        row = row + step.ids
        assert step.conversation.token_ids == row  # within a row, tokens only grow
        if step.is_turn:
            assert set(step.ids[-1:]) <= set(chat.eos_token_ids)
            continue
        shown = [renderer.shown(message) for message in step.conversation.messages]
        whole = renderer.codec.encode_rendered(
            renderer.template.render(shown, scope.tools, add_generation_prompt=True)
        )
        assert renderer.codec.is_same_text(row, whole)
        assert step.edit is None or row == whole


def test_the_vocabulary_is_the_one_that_tiktoken_describes():
    """Tokens of a text are the greedy merges of lowest rank: checked by merging by hand."""
    tokenizer = trl_templates.tokenizer_for("")
    ranks = tokenizer.get_vocab(with_added_tokens=False)
    letters = trl_templates._byte_letters()
    for word in (" trajectories", "naïve", "日本語", "</think", "\n\n\n", "overflow"):
        parts = [letters[byte] for byte in word.encode()]
        while True:
            pairs = [
                (ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks
            ]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        assert [token for token, _ in zip(tokenizer.encode(word).tokens, parts, strict=True)] == parts
