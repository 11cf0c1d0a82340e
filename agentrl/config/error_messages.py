"""Messages about invalid configs, one line per problem: key, given value, valid values, and location."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from agentrl.config.keys import Key, iter_keys, iter_sections, keys_beside
from agentrl.config.origins import Origins
from agentrl.config.section import Section
from agentrl.config.storage_urls import without_credentials
from agentrl.registered import registered

MAX_SHOWN_CHARACTERS = 80
FOREIGN_KEYS = "agentrl.foreign_keys"

RIGHT: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    # pydantic's error type -> description of a valid value
    "greater_than": lambda ctx: f"greater than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']:g}",
    "less_than": lambda ctx: f"less than {ctx['lt']:g}",
    "less_than_equal": lambda ctx: f"at most {ctx['le']:g}",
    "int_type": lambda ctx: "a whole number",
    "int_parsing": lambda ctx: "a whole number",
    "int_from_float": lambda ctx: "a whole number",
    "float_type": lambda ctx: "a number",
    "float_parsing": lambda ctx: "a number",
    "finite_number": lambda ctx: "a finite number",
    "bool_type": lambda ctx: "true or false",
    "bool_parsing": lambda ctx: "true or false",
    "string_type": lambda ctx: "text (put it in quotes: key=\"'123'\" on the command line)",
    "tuple_type": lambda ctx: "a list, as in [a, b]",
    "list_type": lambda ctx: "a list, as in [a, b]",
    "too_long": lambda ctx: f"a list of {ctx['max_length']}",
    "missing": lambda ctx: "complete: a value is missing",
    "dict_type": lambda ctx: "a mapping, as in {name: value}",
    "model_type": lambda ctx: "a section, as in {key: value}",
    "literal_error": lambda ctx: f"one of {_alternatives(ctx['expected'])}",
    "enum": lambda ctx: f"one of {_alternatives(ctx['expected'])}",
}


def describe_unknown(schema: type[Section], key: Key, value: Any, origins: Origins) -> list[str]:
    """Return the lines about one key that the schema does not have.

    A section of verl gets one line per key.
    """
    known = [".".join(k) for k, _ in iter_keys(schema)]
    known += [name for k in keys_beside(schema, key) if (name := ".".join(k)) not in known]
    sections = [".".join(k) for k, _ in iter_sections(schema)]
    lines = []
    for leaf in _leaves(key, value):
        name = ".".join(leaf)
        for framework, answer in _foreign_answers(name, {*known, *sections}):
            lines.append(f"{name} is a key of {framework}; {answer} ({origins.find(leaf)})")
    if lines:
        return lines
    name = ".".join(key)
    return [f"unknown key {name}; {_suggest(name, known, sections)} ({origins.find(key)})"]


def _foreign_answers(name: str, known: Container[str]) -> Iterator[tuple[str, str]]:
    """Yield (framework, what its key is here) for each framework that knows the key.

    Frameworks register a function of the name and the schema's keys in the entry-point group FOREIGN_KEYS.
    """
    for framework, one in registered(FOREIGN_KEYS).items():
        answer = one.load()(name, known)
        if answer is not None:
            yield framework, answer


def _leaves(key: Key, value: Any) -> list[Key]:
    if isinstance(value, Mapping) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves((*key, str(name)), inner)]
    return [key]


def _suggest(name: str, known: Sequence[str], sections: Sequence[str]) -> str:
    """Return a suggestion for an unknown key.

    It is a similar key of the same section, else a key with the same last word, else the most similar of all
    keys.
    """
    section, _, word = name.rpartition(".")
    everything = [*known, *sections]
    siblings = {k.rpartition(".")[2]: k for k in everything if k.rpartition(".")[0] == section}
    near = difflib.get_close_matches(word, siblings, n=1, cutoff=0.7)
    if near:
        return f"did you mean {siblings[near[0]]}?"
    elsewhere = [k for k in everything if k.rpartition(".")[2] == word]
    nearest = elsewhere[:1] or difflib.get_close_matches(name, everything, n=1, cutoff=0.6)
    if nearest:
        return f"did you mean {nearest[0]}?"
    return (
        f"{section or 'a config'} has: {', '.join(siblings)}"
        if siblings
        else f"sections are: {', '.join(sections)}"
    )


def describe_invalid(error: ValidationError, origins: Origins) -> list[str]:
    """Return one line for each invalid value."""
    lines = []
    for problem in error.errors(include_url=False):
        key = tuple(str(part) for part in problem["loc"] if part != "[key]")
        name = _dotted(problem["loc"])
        context = problem.get("ctx", {})
        if problem["type"] == "value_error":  # raised by the schema's own checks, in full sentences
            lines.append(f"{context['error']} ({origins.find(key)})")
        elif problem["type"] in RIGHT:
            lines.append(
                f"{name}: {show(problem['input'])} is wrong; it must be {RIGHT[problem['type']](context)} "
                f"({origins.find(key)})"
            )
        else:
            lines.append(f"{name}: {show(problem['input'])} is wrong: {problem['msg']} ({origins.find(key)})")
    return [without_credentials(line) for line in lines]


def _dotted(location: Sequence[str | int]) -> str:
    text = ""
    for part in location:
        if part == "[key]":
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _alternatives(expected: str) -> str:
    return expected.replace("'", "").replace(" or ", ", ")


def show(value: Any) -> str:
    """Return `value` as a person would write it in YAML; long values are cut."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "..."
