"""Reward from another model as the judge, behind an OpenAI-compatible URL."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from string import Template
from typing import Any, ClassVar

import trio
from pydantic import Field, model_validator

from agentrl.errors import RewardError
from agentrl.extras.judges.scoring_service import Poster
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import Options, read_options, secret
from agentrl.plugins.rewards import RunsIn
from agentrl.types import JsonObject, Message

PLACEHOLDERS = ("question", "answer", "response", "ground_truth", "conversation")
PROMPT = """Judge how well an assistant did a task.

Task:
$question

Right answer or criteria:
$ground_truth

The assistant's answer:
$answer

Explain your judgement in a few sentences. Then end with one line of the form
Score: <a number from $min_score for useless to $max_score for perfect>"""
MAX_VERDICT_CHARS = 4000

# What a line begins with that states a score. Up to two words may precede it, as in "Final Score".
# `scale`: as in "Score (0-10)".
_LABEL = re.compile(
    r"^[^\w\n]*+(?:\d{1,3}+[.)][^\w\n]*+)?(?:[^\W\d_]{1,20}+[^\w\n]++){0,2}?score\b[*_`]*+"
    r"(?:[ \t]*+[(\[](?P<scale>[^()\[\]\n]{0,40}+)[)\]][*_`]*+)?"
    r"[ \t]*+(?P<separator>(?:[:\uff1a=]|[-\u2013\u2014](?=\s)|is\b)[*_`]*+)?\s*+",
    re.IGNORECASE | re.MULTILINE,
)
_OPENING, _CLOSING = r"[\s*_`$<\[({\"']*+(?:\\boxed\{)?", r"[ \t*_`$>\])}\"']*+"
_STATED = re.compile(
    rf"{_OPENING}(?P<number>[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?){_CLOSING}"
    rf"(?P<maximum>(?:/|(?:out )?of)[ \t]*+\d+(?:\.\d+)?)?{_CLOSING}[.!]?{_CLOSING}$",
    re.IGNORECASE | re.MULTILINE,
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_NUMBER_ON_LINE = re.compile(r"[^\d\n]*+\d")


class JudgeOptions(Options):
    """The judge's prompt and how to parse its verdict.

    The score is scaled from min_score..max_score to 0..1.
    """

    url: str  # up to and with /v1
    model: str
    api_key_env: str | None = None
    # a template: $question, $answer, $response, $ground_truth, $conversation, $min_score, $max_score
    prompt: str = PROMPT
    system: str | None = None
    # its first group is the score, and the last match counts; None: the last line such as `Score: 7`
    pattern: str | None = None
    min_score: float = 0.0
    max_score: float = 10.0
    temperature: float = 0.0
    max_tokens: int = Field(1024, ge=1)
    extra_body: JsonObject = Field({})
    max_retries: int = Field(2, ge=0)
    max_concurrent: int = Field(32, ge=1)
    cache_size: int = Field(10_000, ge=0)

    @model_validator(mode="after")
    def _check(self) -> JudgeOptions:
        if self.min_score >= self.max_score:
            raise ValueError(f"min_score={self.min_score:g} is not below max_score={self.max_score:g}")
        try:
            if self.pattern is not None and re.compile(self.pattern).groups < 1:
                raise ValueError(f"pattern {self.pattern!r} has no group around the score")
            Template(self.prompt).substitute(dict.fromkeys((*PLACEHOLDERS, "min_score", "max_score"), ""))
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from error
        except KeyError as error:
            known = ", ".join(f"${name}" for name in PLACEHOLDERS)
            raise ValueError(f"prompt: unknown placeholder ${error.args[0]}; available: {known}") from error
        return self


class LLMJudge(Reward):
    """The judge's score, from 0 to 1. Metrics: score (unscaled). Details: verdict (the judge's text).

    Up to `max_concurrent` attempts are judged concurrently, so the judge's server can batch them. Identical
    requests are sent once, even while the first one is in flight.
    """

    name: ClassVar[str] = "llm_judge"
    runs_in: RunsIn = "trio"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = options = read_options(JudgeOptions, self.config, plugin=f"reward {self.name!r}")
        key = secret(options.api_key_env, plugin=f"reward {self.name!r}")
        self.max_concurrent = options.max_concurrent
        url = options.url.rstrip("/") + "/chat/completions"
        self.poster = Poster(url, api_key=key, max_retries=options.max_retries, reward=self.name)
        # Hash of a request -> the judge's text; least recently used first.
        self._verdicts: OrderedDict[str, str] = OrderedDict()
        self._under_way: dict[str, trio.Event] = {}  # hash of a request in flight -> set when it ends

    async def check_service(self) -> None:
        """Raise ConfigError if nobody listens at the URL."""
        await self.poster.check()

    async def score(self, attempt: Attempted) -> RewardResult:  # type: ignore[override]  # runs_in trio: async
        """Ask the judge, or reuse its cached verdict.

        Raises:
            RewardError: after all retries, the judge did not answer, or gave no score within its range.
        """
        request = self._request(attempt)
        key = hashlib.sha256(json.dumps(request).encode()).hexdigest()
        # A loop: if the request in flight fails, the first task to wake asks again. No await is between this
        # check and the entry that `_judged` makes, so a request is never in flight twice.
        while key in self._under_way:
            await self._under_way[key].wait()
        verdict = self._remembered(key)
        if verdict is None:
            verdict = await self._judged(key, request)
        score = self._score(verdict)
        assert score is not None, "only verdicts with a score are kept"
        value = (score - self._options.min_score) / (self._options.max_score - self._options.min_score)
        return RewardResult(value, {"score": score}, {"verdict": verdict[:MAX_VERDICT_CHARS]})

    async def _judged(self, key: str, request: dict[str, Any]) -> str:
        self._under_way[key] = trio.Event()
        try:
            for _ in range(self._options.max_retries + 1):
                verdict = _text(await self.poster.post(request))
                if self._score(verdict) is not None:
                    self._remember(key, verdict)
                    return verdict
            raise RewardError(
                f"the judge gave no score from {self._options.min_score:g} to {self._options.max_score:g}: "
                f"{verdict[-200:]!r}"
            )
        finally:
            self._under_way.pop(key).set()

    def _request(self, attempt: Attempted) -> dict[str, Any]:
        options, task = self._options, attempt.task
        prompt = Template(options.prompt).substitute(
            question=next((m.content for m in reversed(task.messages) if m.role == "user"), ""),
            answer=attempt.answer,
            response=attempt.response_text,
            ground_truth=task.ground_truth,
            conversation="\n\n".join(map(_shown, attempt.messages)),
            min_score=f"{options.min_score:g}",
            max_score=f"{options.max_score:g}",
        )
        system = [{"role": "system", "content": options.system}] if options.system else []
        return {
            "model": options.model,
            "messages": [*system, {"role": "user", "content": prompt}],
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            **options.extra_body,
        }

    def _score(self, verdict: str) -> float | None:
        options = self._options
        if options.pattern is None:
            score = stated_score(verdict, max_score=options.max_score)
        else:
            matches = list(re.finditer(options.pattern, verdict))
            try:
                score = float(matches[-1][1])
            except (IndexError, TypeError, ValueError):  # no match, an optional group without one, no number
                return None
        return score if score is not None and options.min_score <= score <= options.max_score else None

    def _remembered(self, key: str) -> str | None:
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    def _remember(self, key: str, verdict: str) -> None:
        self._verdicts[key] = verdict
        while len(self._verdicts) > self._options.cache_size:
            self._verdicts.popitem(last=False)


def stated_score(verdict: str, *, max_score: float) -> float | None:
    """Return the number that the last line of the form `Score: 7` states; None if there is none, or if the
    line states anything else.

    `Final Score: 7.5`, `**Score:** 7`, `Score (0-10): 7`, `Score: 7/10` and a number on the next line are
    read. Ranges, several numbers, a decimal comma and another maximum than `max_score` are not.
    """
    found: float | None = None
    for label in _LABEL.finditer(verdict):
        stated = _STATED.match(verdict, label.end())
        if stated is not None:
            scales = [_NUMBER.findall(text or "") for text in (label["scale"], stated["maximum"])]
            is_of_scale = all(not scale or float(scale[-1]) == max_score for scale in scales)
            found = float(stated["number"]) if is_of_scale else None
        elif label["separator"] and _NUMBER_ON_LINE.match(verdict, label.end("separator")):
            found = None
    return found


def _text(reply: Any) -> str:
    try:
        text = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise RewardError(
            f"the judge's server answered {str(reply)[:120]!r}, which is not a chat completion"
        ) from None
    return text if isinstance(text, str) else ""


def _shown(message: Message) -> str:
    calls = "".join(f"\n[calls {call.name}({json.dumps(call.arguments)})]" for call in message.tool_calls)
    return f"[{message.role}]\n{message.content}{calls}"
