"""One attempt: what its page shows is what was written, and what is copied plays again."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from agentrl.data.proximal_files import ProximalRun, write_proximal
from agentrl.data.trajectories import encode, write_parquet
from agentrl.errors import DataError
from agentrl.extras.testing.one_row.models import read_script
from agentrl.extras.view.attempt import MAX_TEXT, AttemptReader, exact_prompt, show, show_tokens, whole_text
from agentrl.extras.view.copying import as_script, as_test
from agentrl.extras.view.shelf import Shelf
from agentrl.extras.view.sources import open_sources
from agentrl.extras.view.token_texts import TokenTexts
from agentrl.testing import Call, Says, call, play, tiny_chat
from agentrl.types import SCORED_OUTCOMES, Message, RewardEvent
from parts.trajectories import make_trajectory
from parts.viewed import random_trajectory, write_run


def test_every_attempt_is_read_back_token_for_token(tmp_path: Path) -> None:
    stored = write_run(tmp_path)
    reader = AttemptReader(open_sources([tmp_path])[0])
    for one in stored:
        shown = show(reader, one.key)
        own = one.trajectory
        if own is None:
            assert one.failed is not None
            assert (shown.failure["text"], shown.became, shown.has_tokens) == (
                one.failed.failure.text,
                one.failed.became,
                False,
            )
            continue
        assert [m.content.text for m in shown.messages] == [m.content for m in own.messages]
        assert shown.num_sampled == own.num_action_tokens
        read = reader.read(one.key).trajectory
        pages = [show_tokens(read, None, start=start, count=4) for start in range(0, own.num_tokens, 4)]
        assert [i for page in pages for i in page.ids] == own.token_ids.tolist()
        assert [i for page in pages for i in page.mask] == own.action_mask.astype(int).tolist()
        known = [p for page in pages for p in page.logprobs]
        assert [p is not None for p in known] == own.action_mask.tolist()
        np.testing.assert_allclose(
            [p for p in known if p is not None], own.behavior_logprobs[own.action_mask], rtol=1e-4
        )
        assert {v for page in pages for v in page.versions} - {None} == set(shown.versions)


def test_ratios_are_those_of_the_stored_log_probabilities(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stored = [one for one in write_run(tmp_path) if one.set == "training" and one.trajectory is not None]
    kept, bare = stored[:2]
    own = kept.trajectory
    proximal = rng.normal(-1, 1, own.num_action_tokens).astype(np.float32)
    proximal[0] = np.float32(-2000.0)  # sampled, and then made impossible
    run = ProximalRun(own.group_id, own.member, 0, proximal)
    write_proximal(tmp_path / "proximal", [run], step=kept.step, part=0, rank=0)
    shelf = Shelf.of(open_sources([tmp_path])[0], None)
    shown = shelf.tokens(shelf.attempts.read(kept.key))
    assert [ratio is None for ratio in shown.ratios] == [not sampled for sampled in shown.mask]
    expected = np.exp(proximal.astype(np.float64) - own.behavior_logprobs[own.action_mask])
    np.testing.assert_allclose([r for r in shown.ratios if r is not None], expected, rtol=1e-4, atol=1e-300)
    part = shelf.tokens(shelf.attempts.read(kept.key), start=1, count=3)
    assert part.ratios == shown.ratios[1:4]
    assert shelf.tokens(shelf.attempts.read(bare.key)).ratios is None


def test_siblings_are_the_group_with_what_differs_first(tmp_path: Path) -> None:
    stored = write_run(tmp_path)
    reader = AttemptReader(open_sources([tmp_path])[0])
    for one in stored:
        if one.trajectory is None:
            continue
        file = one.key.rpartition(":")[0]
        same = [
            s
            for s in stored
            if s.trajectory
            and s.key.startswith(f"{file}:")
            and s.trajectory.group_id == one.trajectory.group_id
        ]
        shown = show(reader, one.key).siblings
        assert {sibling.key for sibling in shown} == {s.key for s in same}
        by_key = {s.key: s.trajectory for s in same}
        for sibling in shown:
            other = by_key[sibling.key]
            common = 0
            while other.messages[: common + 1] == one.trajectory.messages[: common + 1] and common < len(
                other.messages
            ):
                common += 1
            assert sibling.differs_at == (None if other.messages == one.trajectory.messages else common)
            assert sibling.reward == (other.reward if other.outcome in SCORED_OUTCOMES else None)


def test_turns_are_the_last_messages_of_the_assistant_and_rewards_lie_on_theirs(tmp_path: Path) -> None:
    """A prompt may contain turns of an assistant that nobody sampled."""
    said = [
        Message("assistant", "an example"),
        Message("user", "?"),
        Message("assistant", "first"),
        Message("user", "no"),
        Message("assistant", "second"),
    ]
    own = make_trajectory(
        [-1, 0, 0, -1, 1], messages=(Message("user", "e"), *said), rewards=(RewardEvent("r", 2.0, 2),)
    )
    write_parquet(tmp_path / "a.parquet", encode([own]))
    shown = show(AttemptReader(open_sources([tmp_path])[0]), "a.parquet:0")
    assert [(m.content.text, m.turn) for m in shown.messages if m.role == "assistant"] == [
        ("an example", None),
        ("first", 0),
        ("second", 1),
    ]
    assert [(reward.turn, reward.position) for reward in shown.rewards] == [(0, 2)]


def test_a_long_text_arrives_in_parts_that_are_the_whole(tmp_path: Path) -> None:
    text = "".join(random.Random(0).choices("ab\n\x1b\u202e", k=700_000))
    own = make_trajectory([-1, 0], messages=(Message("user", "q"), Message("assistant", text)))
    write_parquet(tmp_path / "a.parquet", encode([own]))
    shown = show(AttemptReader(open_sources([tmp_path])[0]), "a.parquet:0").messages[1].content
    assert (len(shown.text), shown.chars) == (MAX_TEXT, len(text))
    joined = shown.text
    while len(joined) < shown.chars:
        joined += whole_text(own, message=1, part="content", call=0, start=len(joined)).text
    assert joined == text


@pytest.mark.parametrize(
    "key",
    [
        "",
        "config.yaml:0",
        "../x.parquet:0",
        "trajectories/step_000001.parquet:-1",
        "trajectories/step_000001.parquet:99",
        "trajectories/step_000001.parquet:٣",
        "trajectories/../trajectories/step_000001.parquet:0",
        "/etc/passwd:0",
    ],
)
def test_a_key_names_a_row_of_the_source_and_nothing_else(tmp_path: Path, key: str) -> None:
    write_run(tmp_path)
    with pytest.raises(DataError) as caught:
        show(AttemptReader(open_sources([tmp_path])[0]), key)
    assert "\n" not in str(caught.value)


def test_texts_of_tokens_are_the_text_byte_for_byte(tmp_path: Path) -> None:
    chat = tiny_chat()
    tokenizer = chat._tokenizer
    texts = TokenTexts(tokenizer)
    for text in ("75*35=2625\n", "naïve Übung", "漢字 🙂"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert texts.joined(ids) == text
        if text.isascii():
            assert "".join(texts.of(ids)) == text
        else:
            assert any(piece.startswith("<0x") for piece in texts.of(ids)), (
                "half a character is shown as bytes"
            )


def test_what_is_copied_plays_again(tmp_path: Path) -> None:
    """The script gives the same turns, and the test passes, as `agentrl play` and pytest would run them."""
    turns = [
        Says("let me see", (Call("calculator", {"expression": "6*7"}),)),
        call("calculator", expression="1+"),
        "#### 42",
    ]
    own = play(turns, tools=["calculator"], prompt="What is 6*7?\nExactly.")
    (tmp_path / "turns.yaml").write_text(as_script(own))
    again = play(
        read_script(str(tmp_path / "turns.yaml")), tools=["calculator"], prompt="What is 6*7?\nExactly."
    )
    assert again.messages == own.messages
    assert again.token_ids.tolist() == own.token_ids.tolist()
    code = as_test(own)
    names: dict[str, object] = {}
    exec(compile(code, "copied.py", "exec"), names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    test()
    broken = code.replace("'42'", "'43'").replace('"42"', '"43"')
    assert broken != code
    exec(compile(broken, "copied.py", "exec"), names)
    with pytest.raises(AssertionError):
        names[test.__name__]()


def test_the_exact_prompt_is_what_was_read_before_the_first_turn() -> None:
    own = play(["#### 42"], prompt="What is 6*7?")
    prompt = exact_prompt(own, TokenTexts(tiny_chat()._tokenizer)).text
    assert prompt.startswith("<|im_start|>")
    assert "What is 6*7?" in prompt
    assert "#### 42" not in prompt


def test_random_attempts_give_scripts_that_can_be_read(tmp_path: Path) -> None:
    for seed in range(20):
        own = random_trajectory(random.Random(seed), group=seed, member=0, version=3)
        (tmp_path / "turns.yaml").write_text(as_script(own))
        compile(as_test(own), "copied.py", "exec")
        said = read_script(str(tmp_path / "turns.yaml"))
        assert len(said) == own.turn_ids.max() + 1


def test_conversations_are_shown_one_after_the_other_and_their_script_plays_again(tmp_path: Path) -> None:
    nim = Path(__file__).parents[3] / "examples" / "nim.py"

    def game(turns, **extra):
        own = {"agent": "nim", "environment": "pile", "reward": "won", "plugins": [str(nim)]}
        return play(turns, prompt="7", environment_kwargs={"stones": 7}, extra_info=extra, **own)

    trajectory = game(["3", "1", "3"])
    write_parquet(tmp_path / "own.parquet", encode([trajectory]))
    reader = AttemptReader(open_sources([tmp_path / "own.parquet"])[0])
    (file,) = reader._source.files()
    shown = show(reader, f"{file.name}:0")
    assert [(m.conversation, m.content.text, m.turn) for m in shown.messages] == [
        ("first", "7", None),
        ("first", "3", 0),
        ("first", "3", None),
        ("first", "3", 2),
        ("second", "4", None),
        ("second", "1", 1),
    ]
    assert [m.index for m in shown.messages] == list(range(6))
    assert [(s.conversation, s.turns) for s in shown.segments] == [("first", (0, 2)), ("second", (1,))]
    read = reader.read(f"{file.name}:0").trajectory
    assert whole_text(read, message=5, part="content", call=0, start=0).text == "1"
    (tmp_path / "turns.yaml").write_text(as_script(trajectory))
    again = game(read_script(str(tmp_path / "turns.yaml")))
    np.testing.assert_array_equal(again.token_ids, trajectory.token_ids)
