"""An interaction partner with a script: pattern rules, then a list of replies.

For tests, tutorials and simple games.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from agentrl.errors import DataError
from agentrl.plugins import Interaction, InteractionReply
from agentrl.types import Message


@dataclass(frozen=True, slots=True)
class Rule:
    """The reply if `pattern` matches the assistant's last message. A rule can be used any number of times."""

    pattern: re.Pattern[str]
    reply: InteractionReply
    score: float | None


class Scripted(Interaction):
    """Replies with the first rule whose pattern matches, or else with the next text of a list; done when the
    list is empty.

    From the row's `interaction_kwargs`, or else from the config:
        replies: list of texts, used in order.
        rules: [{pattern, reply, done, reward, score}], tried before the list. `pattern` is a regular
            expression, searched case-insensitively. `done: true` ends the conversation. `reward` is for the
            turn, `score` for the conversation.
    The final score is the `score` of the last rule used that has one, or 0 if none was used. If no rule has a
    `score`, there is no final score.
    """

    name: ClassVar[str] = "scripted"
    runtime = "trio"

    async def start(
        self,
        *,
        replies: Sequence[str] | None = None,
        rules: Sequence[Mapping[str, Any]] | None = None,
        **_: Any,
    ) -> None:
        """Read the script.

        Raises:
            DataError: a reply or a rule is malformed.
        """
        replies = self.config.get("replies", ()) if replies is None else replies
        rules = self.config.get("rules", ()) if rules is None else rules
        if isinstance(replies, str) or not all(isinstance(reply, str) for reply in replies):
            raise DataError(f"interaction 'scripted': replies must be a list of texts, got {replies!r}")
        self._replies = iter(replies)
        self._rules = [_rule(index, rule) for index, rule in enumerate(rules)]
        if not self._rules and not list(replies):
            raise DataError(
                "interaction 'scripted' needs `replies` or `rules`, in interaction_kwargs or in its config"
            )
        self._score = 0.0 if any(rule.score is not None for rule in self._rules) else None

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        said = messages[-1].content
        for rule in self._rules:
            if rule.pattern.search(said):
                self._score = self._score if rule.score is None else rule.score
                return rule.reply
        reply = next(self._replies, None)
        return InteractionReply("", is_done=True) if reply is None else InteractionReply(reply, is_done=False)

    async def score(self) -> float | None:
        return self._score


def _rule(index: int, rule: Mapping[str, Any]) -> Rule:
    where = f"interaction 'scripted': rules[{index}]"
    if not isinstance(rule, Mapping) or not isinstance(rule.get("pattern"), str):
        raise DataError(f"{where} must be {{pattern, reply, done, reward, score}}, got {rule!r}")
    reply, is_done = rule.get("reply") or "", bool(rule.get("done"))
    if not isinstance(reply, str):
        raise DataError(f"{where}.reply must be a text, got {reply!r}")
    if not reply and not is_done:
        raise DataError(
            f"{where} neither replies nor ends the conversation; give it a `reply`, or `done: true`"
        )
    try:
        pattern = re.compile(rule["pattern"], re.IGNORECASE)
    except re.error as error:
        raise DataError(
            f"{where}.pattern {rule['pattern']!r} is not a regular expression: {error}"
        ) from error
    reward, score = (_number(rule.get(key), f"{where}.{key}") for key in ("reward", "score"))
    return Rule(pattern, InteractionReply(reply, is_done, reward), score)


def _number(value: Any, where: str) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise DataError(f"{where} must be a number, got {value!r}")
    return None if value is None else float(value)
