"""Write the tables of verl's keys into agentrl/extras/verl/keys.md.

Run `python -m agentrl.extras.verl.importing.docs [FILE]`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.extras.verl.keys import KEPT, MEANINGLESS
from agentrl.extras.verl.renamed import RENAMED, RENAMED_IN_SFT

DEFAULT_FILE = "agentrl/extras/verl/keys.md"
HEAD = """# Keys of verl

Written by `make docs`. [Coming from verl](../../../docs/coming_from_verl.md) explains the import.
A key that names a section covers all keys below it that are not listed.
"""
GROUPS = (
    "data",
    "actor_rollout_ref.model",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.ref",
    "actor_rollout_ref",
    "critic",
    "reward_model",
    "custom_reward_function",
    "reward",
    "algorithm",
    "trainer",
    "ray_init",
    "ray_kwargs",
    "async_training",
    "rollout",
)
"""Groups of verl's keys, in page order, inner groups before outer ones. All other keys are in REST."""
REST = "the rest, and supervised training"


def render() -> str:
    """Return the page, one section per group: first the keys with a counterpart, then those without."""
    entries = {**{key: _entry(RENAMED[key]) for key in RENAMED}, **dict.fromkeys(KEPT, ("the same", ""))}
    missing = {key: ("-", reason) for key, reason in MEANINGLESS.items()}
    sections = [HEAD]
    for group in (*GROUPS, REST):
        rows = [*_rows(group, entries), *_rows(group, missing)]
        if rows:
            title = group if group == REST else f"`{group}`"
            sections.append(f"## {title}\n\n| verl | here | |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    sft = [_row(key, *_entry(ours)) for key, ours in RENAMED_IN_SFT.items()]
    sections.append(
        "For `agentrl sft` these are others:\n\n| verl | here | |\n|---|---|---|\n" + "\n".join(sft) + "\n"
    )
    return "\n".join(sections)


def _rows(group: str, entries: dict[str, tuple[str, str]]) -> Iterator[str]:
    return (_row(key, *entry) for key, entry in entries.items() if _group_of(key) == group)


def _group_of(key: str) -> str:
    return next((group for group in GROUPS if key == group or key.startswith(f"{group}.")), REST)


def _entry(renamed: str) -> tuple[str, str]:
    keys, _, note = renamed.partition("; ")
    return ", ".join(f"`{key}`" for key in keys.split(" and ")), note


def _row(key: str, here: str, note: str) -> str:
    escaped = note.replace("|", r"\|")
    return f"| `{key}` | {here} | {escaped}{' ' * bool(escaped)}|"


def main() -> None:
    """Rewrite the file named on the command line; agentrl/extras/verl/keys.md by default."""
    file = Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_FILE)
    if not file.is_file():
        raise ConfigError(
            f"file {str(file)!r} does not exist; run this from the root of the repository, or name a file"
        )
    file.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
