"""Arithmetic problems for three kinds of agent, and conversations about them for a supervised warm start.

    tool         tool_agent          products of two-digit numbers: a small model must call the calculator
    easy         single_turn_agent   300+47: a small model can learn it
    interaction  interaction_agent   347-300: as easy; the partner reports wrong answers, then the next try

Rows have the schema of verl's datasets. A hash of the normalised expression decides its split, so no
validation expression (nor its mirror image, 34*12 for 12*34) is ever trained on.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from agentrl.data.files import write_rows
from agentrl.errors import ConfigError, DataError
from agentrl.extras.datatools.task_rows import row_schema

Kind = Literal["tool", "easy", "interaction"]
Split = Literal["train", "val"]

KINDS: tuple[Kind, ...] = ("tool", "easy", "interaction")
AGENTS = {"tool": "tool_agent", "easy": "single_turn_agent", "interaction": "interaction_agent"}
DATA_SOURCE = "arithmetic"
FEEDBACK = "Wrong. Try again."
"""The reply of the interaction `gsm8k` to a wrong answer."""


@dataclass(frozen=True, slots=True)
class ArithmeticMix:
    """The questions, and how often the warm-start conversations answer them correctly (shares in [0, 1])."""

    kinds: tuple[Kind, ...] = KINDS
    val_percent: int = 20  # percentage of all expressions
    phrasings: tuple[str, ...] = ("{}=?", "What is {}?", "Compute {}.", "{}")
    factors: tuple[int, int] = (10, 99)  # range of the factors of the products
    sft_tool_use: float = 0.5  # the rest guess
    sft_easy_right: float = 0.55  # the rest guess
    sft_first_right: float = 0.25  # interaction, before any feedback
    sft_retry_right: float = 0.3  # interaction: each try after feedback
    sft_tries: int = 3  # interaction: maximum number of tries


_TEXT = pa.string()
_TOOLS_KWARGS = pa.struct(
    [("calculator", pa.struct([("create_kwargs", pa.struct([("ground_truth", _TEXT)]))]))]
)
_INTERACTION_KWARGS = pa.struct([("name", _TEXT), ("query", _TEXT), ("ground_truth", _TEXT)])
TASK_SCHEMA = row_schema(
    ("index", pa.int64()),
    ("split", _TEXT),
    ("kind", _TEXT),
    ("needs_tool", pa.bool_()),
    ("expression", _TEXT),
    ("tools_kwargs", _TOOLS_KWARGS),
    ("interaction_kwargs", _INTERACTION_KWARGS),
)
_CALL = pa.struct(
    [("id", _TEXT), ("type", _TEXT), ("function", pa.struct([("name", _TEXT), ("arguments", _TEXT)]))]
)
_MESSAGE = pa.struct(
    [
        ("role", _TEXT),
        ("content", _TEXT),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", _TEXT),
        ("name", _TEXT),
    ]
)
SFT_SCHEMA = pa.schema(
    [("messages", pa.list_(_MESSAGE)), ("tools", pa.list_(_TEXT)), ("kind", _TEXT), ("expression", _TEXT)]
)


def write_arithmetic(
    out: Path, *, seed: int, num_train: int, num_val: int, num_sft: int, mix: ArithmeticMix | None = None
) -> None:
    """Write `train.parquet` and `val.parquet` (tasks) and `sft.parquet` (conversations) into `out`.

    The kinds alternate. The expressions of a kind in `val` are distinct; `train` and `sft` share theirs and
    may repeat them. The same arguments give the same rows.

    Raises:
        DataError: `num_val` exceeds the number of expressions in the validation split.
    """
    mix = mix or ArithmeticMix()
    write_rows(out / "train.parquet", _tasks("train", num_train, seed, mix), TASK_SCHEMA)
    write_rows(out / "val.parquet", _tasks("val", num_val, seed, mix), TASK_SCHEMA)
    write_rows(out / "sft.parquet", _conversations(num_sft, seed, mix), SFT_SCHEMA)


def read_kinds(text: str) -> tuple[Kind, ...]:
    """Return the kinds that a text such as `tool,easy` names, in its order.

    Raises:
        ConfigError: it names none, an unknown one, or one twice.
    """
    known: dict[str, Kind] = {kind: kind for kind in KINDS}
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names) or not known.keys() >= set(names):
        raise ConfigError(f"--kinds={text}: should be one or more of {', '.join(KINDS)}, each once")
    return tuple(known[name] for name in names)


# ------------------------------------------------------------------------------------------------ expressions


def normalize(expression: str) -> str:
    """Return the expression with factors and added terms in ascending order: 34*12+5 becomes 5+12*34."""
    added, *subtracted = expression.replace(" ", "").split("-")
    terms = ["*".join(sorted(term.split("*"), key=int)) for term in added.split("+")]
    return "-".join(
        ["+".join(sorted(terms, key=lambda term: [int(factor) for factor in term.split("*")])), *subtracted]
    )


def split_of(expression: str, *, val_percent: int) -> Split:
    """Return the only split in which the expression may appear, in any order of its factors and terms."""
    digest = hashlib.sha256(normalize(expression).encode()).digest()
    return "val" if int.from_bytes(digest[:8]) % 100 < val_percent else "train"


def evaluate(expression: str) -> int:
    """Return the value of an expression of this file: products joined by + and -."""
    added, *subtracted = expression.split("-")
    return sum(map(_product, added.split("+"))) - sum(map(_product, subtracted))


def _product(term: str) -> int:
    left, _, right = term.partition("*")
    return int(left) * int(right or 1)


@functools.cache
def _expressions(kind: Kind, split: Split, mix: ArithmeticMix) -> tuple[str, ...]:
    """Return the expressions of a kind that belong to a split."""
    factors, hundreds, rest = range(mix.factors[0], mix.factors[1] + 1), range(1, 10), range(10, 100)
    all_of_kind = {
        "tool": (f"{a}*{b}" for a in factors for b in factors),
        "easy": (f"{100 * a}+{b}" for a in hundreds for b in rest),
        "interaction": (f"{100 * a + b}-{100 * a}" for a in hundreds for b in rest),
    }[kind]
    return tuple(e for e in all_of_kind if split_of(e, val_percent=mix.val_percent) == split)


def _draw(kind: Kind, split: Split, count: int, rng: random.Random, mix: ArithmeticMix) -> list[str]:
    """Return `count` expressions; all distinct for `val`.

    Raises:
        DataError: `val` has fewer expressions.
    """
    known = _expressions(kind, split, mix)
    if split == "val" and count > len(known):
        raise DataError(
            f"the validation split has {len(known)} expressions of kind {kind!r}, but {count} are needed; "
            "lower num_val"
        )
    return rng.sample(known, count) if split == "val" else rng.choices(known, k=count)


def _draw_kinds(
    name: str, split: Split, count: int, seed: int, mix: ArithmeticMix
) -> Iterator[tuple[random.Random, Kind, str]]:
    """Yield (generator, kind, expression) for `count` rows of the file `name`, with alternating kinds."""
    rng = random.Random(f"{DATA_SOURCE}:{name}:{seed}")
    kinds = mix.kinds
    shares = [len(range(position, count, len(kinds))) for position in range(len(kinds))]
    drawn = [_draw(kind, split, share, rng, mix) for kind, share in zip(kinds, shares, strict=True)]
    for index in range(count):
        position = index % len(kinds)
        yield rng, kinds[position], drawn[position][index // len(kinds)]


# ------------------------------------------------------------------------------------------------------ tasks


def _tasks(split: Split, count: int, seed: int, mix: ArithmeticMix) -> Iterator[dict[str, Any]]:
    for index, (rng, kind, expression) in enumerate(_draw_kinds(split, split, count, seed, mix)):
        yield _task(index, split, kind, expression, rng.choice(mix.phrasings).format(expression))


def _task(index: int, split: Split, kind: Kind, expression: str, question: str) -> dict[str, Any]:
    truth = str(evaluate(expression))
    needs_tool, interacts = kind == "tool", kind == "interaction"
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {
            "index": index,
            "split": split,
            "kind": kind,
            "needs_tool": needs_tool,
            "expression": expression,
            "tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": truth}}}
            if needs_tool
            else None,
            "interaction_kwargs": {"name": "gsm8k", "query": question, "ground_truth": truth}
            if interacts
            else None,
        },
        "agent_name": AGENTS[kind],
    }


# ---------------------------------------------------------------------------------------------- conversations


def _conversations(count: int, seed: int, mix: ArithmeticMix) -> Iterator[dict[str, Any]]:
    for rng, kind, expression in _draw_kinds("sft", "train", count, seed, mix):
        question = {"role": "user", "content": rng.choice(mix.phrasings).format(expression)}
        answers = {"tool": _tool_turns, "easy": _easy_turns, "interaction": _interaction_turns}[kind](
            rng, expression, mix
        )
        tools = ["calculator"] if kind == "tool" else []
        yield {"messages": [question, *answers], "tools": tools, "kind": kind, "expression": expression}


def _tool_turns(rng: random.Random, expression: str, mix: ArithmeticMix) -> list[dict[str, Any]]:
    truth = evaluate(expression)
    if rng.random() >= mix.sft_tool_use:
        return [_answer(_bad_guess(expression))]
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
        },
        {"role": "tool", "content": str(truth), "tool_call_id": "call00000", "name": "calculator"},
        _answer(truth),
    ]


def _easy_turns(rng: random.Random, expression: str, mix: ArithmeticMix) -> list[dict[str, Any]]:
    truth = evaluate(expression)
    return [_answer(truth if rng.random() < mix.sft_easy_right else _bad_guess(expression))]


def _interaction_turns(rng: random.Random, expression: str, mix: ArithmeticMix) -> list[dict[str, Any]]:
    truth = evaluate(expression)
    turns: list[dict[str, Any]] = []
    for attempt in range(mix.sft_tries):
        if turns:
            turns.append({"role": "user", "content": FEEDBACK})
        is_right = rng.random() < (mix.sft_retry_right if attempt else mix.sft_first_right)
        turns.append(_answer(truth if is_right else _bad_guess(expression)))
        if is_right:
            break
    return turns


def _answer(value: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"#### {value}"}


def _bad_guess(expression: str) -> int:
    """Return the expression's first number, which is never its value.

    The wrong answer is always the same: random answers would drown what a short warm start can learn about
    digits.
    """
    return int(re.split(r"[-+*]", expression, maxsplit=1)[0])
