"""Answer checkers against people: thousands of hand-judged answers, laws of numbers, and the reference
solutions of the data sets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.extras.answers import aime, gsm8k, math
from agentrl.extras.answers.aime import Aime, extract_integer, parse_integer
from agentrl.extras.answers.answer_number import MAX_TAIL_CHARS
from agentrl.extras.answers.boxed import MAX_MARKED_CHARS
from agentrl.extras.answers.gsm8k import Gsm8k, extract_answer, parse_number
from agentrl.extras.answers.math import Math
from agentrl.extras.answers.plain_text import plain
from agentrl.plugins import Reward, RewardResult
from agentrl.types import Message, ToolCall
from parts.cpu_time import cpu_s
from parts.trajectories import attempted, make_task

ANSWERS = Path(__file__).parent / "answers"
VERDICTS = {"strict": (1.0, 1.0), "flexible": (0.0, 1.0), "wrong": (0.0, 0.0)}
"""What accuracy_strict and accuracy_flexible must be for the answers in a list of this name."""


def cases(kind: str) -> Iterator[tuple[object, str, str]]:
    """Yield (truth, verdict, text). `boxed` and `other` hold what stands in a box, right and wrong."""
    for group in yaml.safe_load((ANSWERS / f"{kind}.yaml").read_text()):
        assert set(group) <= {"truth", "boxed", "other", *VERDICTS}
        yield from (
            (group["truth"], verdict, text) for verdict in VERDICTS for text in group.get(verdict, ())
        )
        yield from (
            (group["truth"], "strict", f"So the answer is $\\boxed{{{inside}}}$.")
            for inside in group.get("boxed", ())
        )
        yield from (
            (group["truth"], "wrong", f"So the answer is $\\boxed{{{inside}}}$.")
            for inside in group.get("other", ())
        )


def score(reward: Reward, text: str, truth: object, *calls: ToolCall) -> RewardResult:
    result = reward.score(attempted(make_task("q", truth), Message("assistant", text, calls)))
    assert result is not None
    return result


# ----------------------------------------------------------------------------------------------------- people


@pytest.mark.parametrize(
    ("reward", "part"),
    [(Gsm8k(), 1), (Aime(), 1), (Math(), 5), pytest.param(Math(), 1, marks=pytest.mark.slow)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_the_checkers_agree_with_people(reward, part):
    """One in `part` of all judged answers: an algebra system takes a hundredth of a second for each."""
    judged = list(cases(reward.name))
    assert len(judged) >= 300
    assert len({(str(truth), text) for truth, _, text in judged}) == len(judged), "a case stands there twice"
    judged = judged[::part]
    found = {case: score(reward, case[2], case[0]).metrics for case in judged}
    wrong = [
        case
        for case in judged
        if (found[case]["accuracy_strict"], found[case]["accuracy_flexible"]) != VERDICTS[case[1]]
    ]
    assert not wrong, f"{len(wrong)} of {len(judged)}: {wrong[:10]}"


@pytest.mark.parametrize(("kind", "checker"), [("gsm8k", gsm8k), ("aime", aime), ("math", math)])
def test_canonical_texts_stand_for_themselves(kind, checker):
    """Read again, a canonical text is itself; equal values have equal texts."""
    for _, _, text in list(cases(kind))[:: 5 if kind == "math" else 1]:
        canonical = checker.canonical(text)
        assert canonical is None or checker.canonical(canonical) == canonical, text


@pytest.mark.parametrize(
    ("reward", "mark"), [(Gsm8k, "#### {}"), (Aime, r"\boxed{{{}}}"), (Math, r"\boxed{{{}}}")]
)
def test_both_readings_stand_side_by_side_and_the_option_chooses(reward, mark):
    for strict in (True, False):
        for text, right, in_form in (
            (mark.format(72), True, True),
            ("The answer is 72.", True, False),
            (mark.format(71), False, True),
        ):
            result = score(reward({"strict": strict}), text, "72")
            accuracy = right and (in_form or not strict)
            assert result.value == result.metrics["accuracy"] == accuracy
            assert dict(result.metrics) == {
                "accuracy": accuracy,
                "accuracy_strict": right and in_form,
                "accuracy_flexible": right,
                "format": in_form,
            }
            assert result.details["answer"] == (("72" if right else "71") if in_form or not strict else None)


@pytest.mark.parametrize("reward", [Gsm8k(), Aime({"strict": True}), Math({"strict": True})])
def test_what_is_handed_in_needs_no_form(reward):
    result = score(reward, "", "72", ToolCall("1", "finish", {"answer": "It is 72."}))
    assert (result.value, result.metrics["accuracy_strict"], result.details["answer"]) == (1.0, 1.0, "72")


# ------------------------------------------------------------------------------------------------------- laws


def grouped(separator: str) -> Callable[[int], str]:
    return lambda number: f"{number:,}".replace(",", separator)


DIGITS = [str, *map(grouped, [",", " ", "\u202f", "{,}", r"\,"]), "{}.0".format, "{}.00".format, "0{}".format]
AROUND = [
    "{}", "${}", r"\${}", "${}$", "**{}**", "`{}`", "{} apples", "{}km", "{} %", r"{}\%", r"\text{{{}}}",
    r"{} \text{{ m}}^2", "({})",
    "x = {}", "{0} + 0 = {0}", "about {}", "The answer is {}", "{}, as said", "{} (seven)", r"\mathbf{{{}}}",
    r"{}^\circ", "€{}", "{} USD",
]  # fmt: skip
STRICT = ["#### {}", "so 7 of 9.\n#### {}", "#### {}\n\nIn 3 steps.", "#### 8\n#### {}"]
FLEXIBLE = [
    "The answer is {}.",
    "**Answer:** {}",
    "7 of 9.\n\n### Answer\n{}",
    r"so \boxed{{{}}}",
    "At last:\n{}",
]


@given(
    st.integers(10, 10**12),
    st.sampled_from(DIGITS),
    st.sampled_from(AROUND),
    st.sampled_from([*STRICT, *FLEXIBLE]),
    st.integers(0, 10**12),
)
@settings(max_examples=200, deadline=None)
def test_however_a_number_is_written_the_verdict_is_the_same(number, digits, around, frame, other):
    text = frame.format(around.format(digits(number)))
    for strict in {False, frame in STRICT}:
        assert extract_answer(text, strict=strict) == number, text
    for truth in (str(number), number, f"{number:,}", f"as said\n#### {number}"):
        assert score(Gsm8k({"strict": False}), text, truth).value == 1.0
    assert other == number or score(Gsm8k({"strict": False}), text, str(other)).value == 0.0, (
        "a wrong number never passes"
    )
    assert score(Gsm8k({"strict": False}), text, str(-number)).value == 0.0


@given(
    st.integers(0, 999),
    st.sampled_from([str, "{:03d}".format, "{}.0".format, "{}.".format]),
    st.sampled_from(AROUND),
    st.integers(0, 999),
)
@settings(max_examples=100, deadline=None)
def test_however_an_integer_is_written_aime_takes_it(number, digits, around, other):
    text = around.format(digits(number))
    assert extract_integer(rf"so \boxed{{{text}}} of 9.", strict=True) == number
    assert score(Aime(), rf"\boxed{{{text}}}", f"{other:03d}").value == (other == number)


@given(st.integers(0, 99), st.integers(1, 99), st.integers(2, 99), st.booleans())
def test_fractions_mixed_numbers_and_decimals_are_values(whole, part, base, is_negative):
    sign, value = ("-", -1) if is_negative else ("", 1)
    forms = [(f"{part}/{base}", Fraction(part, base)), (rf"\frac{{{part}}}{{{base}}}", Fraction(part, base))]
    if part < base and whole:
        forms += [
            (f"{whole} {part}/{base}", whole + Fraction(part, base)),
            (rf"{whole}\frac{{{part}}}{{{base}}}", whole + Fraction(part, base)),
        ]
    forms.append((f"{whole}.{part:02d}", whole + Fraction(part, 100)))
    for text, number in forms:
        assert extract_answer(f"#### {sign}{text}", strict=True) == value * number, text
        assert extract_answer(rf"\boxed{{{sign}{text}}}", strict=False) == value * number, text


MATH_AROUND = [
    "{}", r"\${}", r"{}\%", "x = {}", r"\text{{{}}}", r"{} \text{{ cm}}^2", r"{}^\circ", r"\left({}\right)",
    r"\frac{{{}}}{{1}}", "{} + 0",
]  # fmt: skip


@given(st.integers(2, 10**6), st.sampled_from(MATH_AROUND), st.integers(2, 10**6))
@settings(max_examples=30, deadline=None)
def test_however_a_number_is_written_math_takes_it(number, around, other):
    text = rf"So \boxed{{{around.format(number)}}}."
    assert score(Math(), text, str(number)).value == 1.0
    assert score(Math(), text, str(other)).value == (other == number), "a wrong number never passes"
    assert score(Math(), rf"So \boxed{{{number}}}.", around.format(number)).value == 1.0, (
        "nor does it matter how the truth is written"
    )


@pytest.mark.parametrize(
    ("handed_in", "truth", "value"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"5\sqrt{2}", r"\sqrt{50}", 1.0),
        (r"5\sqrt{2}", "5", 0.0),
        ("It is $5$.", "5", 1.0),
        ("(C)", "C", 1.0),
    ],
)
def test_what_is_handed_in_is_the_answer_itself(handed_in, truth, value):
    assert score(Math(), "", truth, ToolCall("1", "finish", {"answer": handed_in})).value == value


@pytest.mark.parametrize(
    ("reward", "truth", "tolerance", "text", "value"),
    [
        (Gsm8k(), 2.5, 0.01, "#### 2.52", 1.0),
        (Gsm8k(), 2.5, 0.01, "#### 2.53", 0.0),
        (Gsm8k(), 2.5, None, "#### 2.52", 0.0),
        (Gsm8k(), "250", 0.01, "#### 251", 0.0),
        (Math(), "2.5", 0.01, r"\boxed{2.52}", 1.0),
        (Math(), "2.5", 0.01, r"\boxed{2.53}", 0.0),
        (Math(), "2.5", None, r"\boxed{2.52}", 0.0),
        (Math(), "250", 0.01, r"\boxed{251}", 0.0),
    ],
)
def test_a_row_may_allow_a_tolerance_for_a_decimal(reward, truth, tolerance, text, value):
    """Integers are compared exactly whatever the row says."""
    task = make_task("q", truth, extra_info={} if tolerance is None else {"tolerance": tolerance})
    reward.check(task)
    assert reward.score(attempted(task, text)).value == value


@pytest.mark.parametrize("reward", [Gsm8k(), Math()])
@pytest.mark.parametrize("tolerance", [-0.1, 1, "0.1", True])
def test_a_tolerance_is_a_share(reward, tolerance):
    task = make_task("q", "2.5", extra_info={"tolerance": tolerance})
    with pytest.raises(DataError, match=r"extra_info\.tolerance"):
        reward.check(task)


@given(st.fractions(-(10**6), 10**6))
def test_canonical_texts_of_numbers(number):
    assert gsm8k.canonical(str(number)) == str(number) == gsm8k.canonical(f"#### {number}", strict=True)
    assert parse_number(str(number)) == number


@given(st.integers(-(10**17), 10**17))
def test_a_plain_ground_truth_is_what_an_answer_with_it_alone_means(number):
    assert parse_number(str(number)) == extract_answer(str(number), strict=False) == number


@given(st.text("\\{}$#*0123456789,. -=/()answeri:\n", max_size=300), st.booleans())
@settings(deadline=None)
def test_no_text_breaks_a_checker(text, strict):
    """And plain text is plain already."""
    assert isinstance(extract_answer(text, strict=strict), Fraction | None)
    assert extract_integer(text, strict=strict) in (None, *range(1000))


ADVERSARIAL = [
    "1,", "1 ", "0", "9", "1.", "-", "- ", "=", "1=", "1+", "1/", "(", "(1", "{", "{1", "\\frac{1}",
    "\\text{", "\\boxed{", "\\boxed{1",
    "**1", "**", "####", "#### 1", "answer is ", "answer", "the answer to ", "answer (", "wait ", "wait "
    "1 ", "1 and ", "1 or ", "a ", "a1 ",
    "between 1 and ", "and a half", "one hundred ", "<<1", "<<1>>", "\\", "\\a", "\\\\", "\n", "1\n", "\n- "
    "1 ", "1 000 ", ",000", "1e9",
    "1×10^9", "^", "_{1}", "$", "$1$", "√1", "1/1/", "1:1:", "\u2212", "½", ". ", "1. ",
]  # fmt: skip


def test_no_text_takes_long():
    """The checkers run in the event loop.

    300 ms of CPU allow for a slow machine; a pattern that backtracks takes seconds.
    """
    for piece in ADVERSARIAL:
        for text in (
            piece * (2 * MAX_MARKED_CHARS // len(piece)),
            f"#### {piece * MAX_TAIL_CHARS}",
            f"The answer is {piece * 700}",
            f"\\boxed{{{piece * 300}}}",
        ):
            for checker in (Gsm8k({"strict": False}), Aime()):
                assert cpu_s(partial(score, checker, text, "72"), below=0.1) < 0.3, (checker.name, text[:20])


# --------------------------------------------------------------------------------------------- reference data


def reference(name: str) -> Path:
    shared = Path(os.environ.get("AGENTRL_SHARED", Path(__file__).resolve().parents[4] / "shared"))
    source = shared / "data" / name
    if not source.is_dir() and os.environ.get("CI") != "true":
        pytest.skip(f"{source} does not exist: set AGENTRL_SHARED to the folder that holds data/{name}")
    return source


@pytest.mark.parametrize(
    ("split", "size"), [("test", 1319), pytest.param("train", 7473, marks=pytest.mark.slow)]
)
def test_every_reference_solution_of_gsm8k_is_right(split, size):
    solutions = [
        json.loads(line)["answer"]
        for line in (reference("gsm8k") / f"{split}.jsonl").read_text().splitlines()
    ]
    assert len(solutions) == size
    num_read = 0
    for solution in solutions:
        body, _, stated = solution.rpartition("####")
        number = int(stated.replace(",", ""))
        assert (
            extract_answer(solution, strict=True)
            == extract_answer(solution, strict=False)
            == number
            == parse_number(solution)
        )
        assert extract_answer(f"{body}#### {number + 1}", strict=False) != number, "a changed number fails"
        num_read += extract_answer(body, strict=False) == number
    assert num_read / size > 0.985, (
        "without their last line, prose alone: some conclude with another number than they ask for"
    )


WORDINGS = [
    "#### {}", "#### ${}", "#### **{}**", "#### {} dollars", "####{}", "#### {}.", "{} ####", "#### The "
    "answer is {}.", "The answer is {}.",
    "The answer is ${}$.", "**Answer:** {}", "### Answer\n\n**{}**", r"\boxed{{{}}}", r"The answer is "
    r"$\boxed{{{}}}$.",
    "So she has {} apples.",
    r"\[ \boxed{{{}\text{{ dollars}}}} \]", "<think>It is 3?</think>\n#### {}", "Therefore, Tom pays **${}** "
    "in total.", "x = {}",
    "The final answer is: {}", "Answer: {} hours", "#### {}\n\nI used 3 steps.", "In total, there are {} of "
    "them.",
]  # fmt: skip


def written(number: int) -> list[str]:
    return [str(number), f"{number:,}", f"{number}.00", f"{number:,}".replace(",", "{,}")]


@pytest.mark.parametrize("part", [60, pytest.param(1, marks=pytest.mark.slow)])
def test_every_true_value_of_gsm8k_is_right_in_natural_words(part):
    lines = [
        line
        for split in ("test", "train")
        for line in (reference("gsm8k") / f"{split}.jsonl").read_text().splitlines()
    ]
    truths = [int(json.loads(line)["answer"].rpartition("####")[2].replace(",", "")) for line in lines][
        ::part
    ]
    missed = [
        text
        for number in truths
        for digits in written(number)
        for text in (wording.format(digits) for wording in WORDINGS)
        if extract_answer(text, strict=False) != number
    ]
    assert not missed, f"{len(missed)}: {missed[:10]}"


def test_every_answer_of_aime_is_right():
    answers = [
        json.loads(line)["answer"]
        for file in sorted(reference("aime").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert len(answers) == 60
    for answer in answers:
        number = int(answer)
        assert parse_integer(answer) == number
        for text in (
            f"so \\boxed{{{answer}}}.",
            f"\\boxed{{{number:03d}}}",
            f"The answer is ${answer}$.",
            f"#### {answer}",
        ):
            assert score(Aime(), text, answer).value == 1.0
            assert score(Aime(), text, str((number + 1) % 1000)).value == 0.0


def test_plain_text_of_latex_and_markdown():
    assert plain(r"**Total:** $\$1{,}234$ \text{ per day}") == "Total: $$1,234$ per day"
    assert plain(r"\dfrac{7}{2} \times 10^{-3}").split() == ["7/2", "×", "10^{-3}"]
    assert re.search("<<", plain("9 * 2 = <<9*2=18>>18")) is None
