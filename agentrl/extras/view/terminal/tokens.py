"""Tokens as coloured pieces, and what is known of one token in a line."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from agentrl.extras.view.attempt import ShownAttempt, ShownTokens
from agentrl.extras.view.terminal.lines import StyledText, harmless, one_line

Coloring = Literal["mask", "logprob", "ratio", "lag", "version", "turn"]
COLORINGS: tuple[Coloring, ...] = get_args(Coloring)
TITLES: Mapping[Coloring, str] = {
    "mask": "sampled or context",
    "logprob": "probability at sampling",
    "ratio": "proximal / behavior",
    "lag": "lag",
    "version": "version",
    "turn": "turn",
}

# Black on light colours: readable on dark and on light terminals, and without colours still told apart from
# context, which is dim.
CONTEXT = "dim"
SAMPLED = "black on #bcd7f5"
UNKNOWN = "black on #dddddd"
HEAT = (
    "black on #cfead0",
    "black on #e6efb4",
    "black on #f7e39a",
    "black on #f6c383",
    "black on #ee9c7e",
    "black on #e2787a",
)
"""From what is expected to what is not."""
APART = (
    "black on #bcd7f5",
    "black on #f6d5a8",
    "black on #c9e8c0",
    "black on #e6c6ee",
    "black on #f4c6c6",
    "black on #c4e6e4",
)
"""For numbers without an order; after six, they repeat."""
RATIO_BOUNDS = (1.05, 1.2, 1.5, 2.0, 5.0)
"""Up to which a ratio, or its inverse, has a colour."""
PROBABILITIES = ("p > 0.8", "to 0.4", "to 0.16", "to 0.04", "to 0.006", "less")


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Consecutive tokens of an attempt."""

    attempt: ShownAttempt
    tokens: ShownTokens

    def pieces(self, coloring: Coloring) -> Iterator[StyledText]:
        """Yield each token; a line where another segment begins."""
        forks = {segment.start for segment in self.attempt.segments[1:]}
        rewarded = {reward.position for reward in self.attempt.rewards}
        for at in range(len(self.tokens.ids)):
            place = self.tokens.start + at
            if place in forks:
                yield StyledText("\n── another segment begins: the history was edited ──\n", "bold")
            style = self.style(at, coloring)
            style += " italic" if at in self.tokens.special else ""
            yield StyledText(self._text(at), style + (" underline bold" if place in rewarded else ""), place)

    def style(self, at: int, coloring: Coloring) -> str:
        """Return the style of the token at a place of this part."""
        if not self.tokens.mask[at]:
            return CONTEXT
        version, logprob = self.tokens.versions[at], self.tokens.logprobs[at]
        assert version is not None
        assert logprob is not None
        match coloring:
            case "mask":
                return SAMPLED
            case "logprob":
                return HEAT[min(5, int(math.sqrt(max(0.0, -logprob)) * 2.2))]
            case "ratio":
                ratio = None if self.tokens.ratios is None else self.tokens.ratios[at]
                return UNKNOWN if ratio is None else HEAT[bisect.bisect(RATIO_BOUNDS, _factor(ratio))]
            case "lag":
                learned = self.attempt.learned_by
                return UNKNOWN if learned is None else HEAT[min(5, max(0, learned - version))]
            case "version":
                return APART[(version - self.attempt.versions[0]) % 6]
            case "turn":
                return APART[self.tokens.turns[at] % 6]

    def facts(self, place: int) -> str:
        """Return a line about the token at a place of the attempt."""
        at, own = place - self.tokens.start, self.tokens
        text = "" if own.texts is None else f" {own.texts[at]!a}"
        found = [f"token {place}", f"id {own.ids[at]}{text}"]
        version, logprob = own.versions[at], own.logprobs[at]
        if version is None or logprob is None:
            found.append("context")
        else:
            learned = self.attempt.learned_by
            lag = "not trained on" if learned is None else f"lag {learned - version}"
            found += [
                f"sampled in turn {own.turns[at] + 1}",
                f"log-probability {logprob:.5g} (p {math.exp(logprob):.3g})",
                f"version {version}, {lag}",
            ]
            if own.ratios is not None and (ratio := own.ratios[at]) is not None:
                found.append(f"proximal / behavior {ratio:.4g}")
        found += [
            f"reward {one_line(reward.name)} {reward.value:.4g}"
            for reward in self.attempt.rewards
            if reward.position == place
        ]
        return " · ".join(found)

    def _text(self, at: int) -> str:
        if self.tokens.texts is None:
            return f"{self.tokens.ids[at]} "
        return harmless(self.tokens.texts[at].replace("\t", "⇥   ").replace("\n", "⏎\n"))


def _factor(ratio: float) -> float:
    """Return how far a ratio is from 1, in either direction, as a factor of at least 1."""
    return math.inf if ratio == 0 else max(ratio, 1 / ratio)


def legend(attempt: ShownAttempt, coloring: Coloring) -> Iterator[StyledText]:
    """Yield what the colours mean."""
    yield StyledText(f"{TITLES[coloring]}: ", "bold")
    for label, style in _boxes(attempt, coloring):
        yield StyledText(f" {label} ", style)
        yield StyledText(" ")
    yield StyledText(" context ", CONTEXT)


def _boxes(attempt: ShownAttempt, coloring: Coloring) -> list[tuple[str, str]]:
    match coloring:
        case "mask":
            return [("sampled", SAMPLED)]
        case "logprob":
            return list(zip(PROBABILITIES, HEAT, strict=True))
        case "ratio":
            bounds = [f"up to {bound:g} or 1/{bound:g}" for bound in RATIO_BOUNDS]
            return [*zip((*bounds, "further"), HEAT, strict=True), ("not stored", UNKNOWN)]
        case "lag" if attempt.learned_by is None:
            return [("no step has trained on it", UNKNOWN)]
        case "lag":
            return list(zip(("0", "1", "2", "3", "4", "5 or more"), HEAT, strict=True))
        case "version":
            return [(str(one), APART[(one - attempt.versions[0]) % 6]) for one in attempt.versions]
        case "turn":
            turns = sorted({turn for segment in attempt.segments for turn in segment.turns})
            return [(str(turn + 1), APART[turn % 6]) for turn in turns]
