"""What is said of a curriculum before a run."""

from __future__ import annotations

import json
from pathlib import Path

from agentrl.buffer.buffer import ReplayBuffer
from agentrl.buffer.curriculum import Curriculum
from agentrl.buffer.ledger import LedgerRules
from agentrl.config.curriculum import CurriculumConfig
from agentrl.config.schema import Config
from agentrl.extras.plan.explain import explain, find_warnings
from parts.trajectories import ATTEMPTS, Rows

NUM_TASKS = 6


def curriculum(**options) -> Curriculum:
    return Curriculum(["s"] * NUM_TASKS, CurriculumConfig(**options), seed=3, shuffle=True)


def buffer(
    *, has_curriculum: bool = True, drop_constant_groups: bool = False, has_greedy: bool = False, **rules
) -> ReplayBuffer:
    chosen = curriculum(by_pass_rate=True) if has_curriculum else None
    rules = LedgerRules(**{"groups_per_step": 2, "max_staleness": 0, "group_size": 2, **rules})
    target = ReplayBuffer(
        Rows(NUM_TASKS),
        rules,
        ATTEMPTS,
        drop_constant_groups=drop_constant_groups,
        has_greedy=has_greedy,
        curriculum=chosen,
    )
    target.advance(0)
    return target


# ----------------------------------------------------------------------------------------------------- config


def config(**curriculum_options) -> Config:
    return Config.model_validate({"data": {"curriculum": curriculum_options}})


def test_explain_says_what_is_drawn():
    def line(chosen: Config) -> str:
        return next(
            text.split("tasks", 1)[1].strip()
            for text in explain(chosen).splitlines()
            if text.startswith("  tasks  ")
        )

    assert line(Config()) == "every task once per epoch"
    both = config(source_weights={"gsm8k": 2, "aime": 1}, by_pass_rate=True, floor=0.2)
    words = "once each, then by pass rate: most often near 0.5, other tasks at least 0.2 times as often"
    assert line(both) == f"groups from gsm8k 66.7%, aime 33.3%; {words}"


def test_explain_warns_of_what_has_no_effect():
    def warned(curriculum_options: dict, num_train_rows: int | None = None, **trainer) -> list[str]:
        chosen = Config.model_validate(
            {"data": {"curriculum": curriculum_options}, "trainer": trainer, "buffer": {"groups_per_step": 4}}
        )
        return [text for text in find_warnings(chosen, num_train_rows=num_train_rows) if "curriculum" in text]

    assert warned({"floor": 0.2}) == [
        "data.curriculum.floor=0.2 has no effect without data.curriculum.by_pass_rate"
    ]
    used = {"by_pass_rate": True, "floor": 0.2}
    assert "has no effect in the first epoch" in warned(used)[0]
    assert (
        warned(used, total_epochs=2)
        == warned(used, steps=10)
        == warned(used, 39, steps=10)
        == warned({})
        == []
    )
    assert len(warned(used, 40, steps=10)) == 1


# ---------------------------------------------------------------------------------------------------- sources


def rows(path: Path, sources: list[str]) -> str:
    prompt = [{"role": "user", "content": "?"}]
    path.write_text(
        "".join(json.dumps({"data_source": source, "prompt": prompt}) + "\n" for source in sources)
    )
    return str(path)
