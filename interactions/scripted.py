"""A partner who follows a script: rules by pattern, then a list of replies. For tests, tutorials and simple games."""

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
    """What is said when `pattern` is found in the assistant's last message; each rule may be used any number of times."""

    pattern: re.Pattern[str]
    reply: InteractionReply


class Scripted(Interaction):
    """Answers by the first rule whose pattern matches, else by the next reply of the list; done when nothing is left.

    Of the row's `interaction_kwargs`, else of the config:
        replies: texts, said one after the other.
        rules: [{pattern, reply, done, reward}], tried before the list; `pattern` is a regular expression, searched
            without regard to case; `done: true` ends the conversation, `reward` goes to the turn.
    The final score is the largest reward that a rule gave; none without such a rule.
    """

    name: ClassVar[str] = "scripted"
    runtime = "trio"

    async def start(self, *, replies: Sequence[str] | None = None, rules: Sequence[Mapping[str, Any]] | None = None, **_: Any) -> None:
        """Take the script.

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
            raise DataError("interaction 'scripted' needs `replies` or `rules`, in interaction_kwargs or in its config")
        self._scores: list[float] = []

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        said = messages[-1].content
        for rule in self._rules:
            if rule.pattern.search(said):
                if rule.reply.reward is not None:
                    self._scores.append(rule.reply.reward)
                return rule.reply
        reply = next(self._replies, None)
        return InteractionReply("", is_done=True) if reply is None else InteractionReply(reply, is_done=False)

    async def score(self) -> float | None:
        if not any(rule.reply.reward is not None for rule in self._rules):
            return None
        return max(self._scores, default=0.0)


def _rule(index: int, rule: Mapping[str, Any]) -> Rule:
    where = f"interaction 'scripted': rules[{index}]"
    if not isinstance(rule, Mapping) or not isinstance(rule.get("pattern"), str):
        raise DataError(f"{where} must be {{pattern, reply, done, reward}}, got {rule!r}")
    reply, is_done, reward = rule.get("reply") or "", bool(rule.get("done")), rule.get("reward")
    if not isinstance(reply, str):
        raise DataError(f"{where}.reply must be a text, got {reply!r}")
    if not reply and not is_done:
        raise DataError(f"{where} says nothing and does not end the conversation; give it a `reply`, or `done: true`")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        raise DataError(f"{where}.reward must be a number, got {reward!r}")
    try:
        pattern = re.compile(rule["pattern"], re.IGNORECASE)
    except re.error as error:
        raise DataError(f"{where}.pattern {rule['pattern']!r} is no regular expression: {error}") from error
    return Rule(pattern, InteractionReply(reply, is_done, None if reward is None else float(reward)))
