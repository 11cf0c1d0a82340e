"""Reward from the user's HTTP service."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from agentrl.errors import RewardError
from agentrl.extras.judges.scoring_service import Poster
from agentrl.plugins import Attempted, Reward, RewardResult
from agentrl.plugins.options import Options, read_options, secret
from agentrl.plugins.rewards import RunsIn
from agentrl.rewards.custom import result_of
from agentrl.types import JsonObject


class RemoteOptions(Options):
    """`url`: where to post. `api_key_env`: environment variable with the bearer token."""

    url: str
    api_key_env: str | None = None
    max_retries: int = Field(2, ge=0)
    max_concurrent: int = Field(32, ge=1)


class Remote(Reward):
    """Posts each attempt as JSON. The reply's `score` is the value, its other numbers are metrics, the rest
    details.

    Request: data_source, solution_str, ground_truth, extra_info, task_id, outcome, num_turns,
    num_response_tokens, messages [{role, content, reasoning, tool_calls}]. With an environment, its facts are
    `extra_info.environment_facts`, as reward functions get them.
    Reply: {"score": 0.5, ...}; null means that it does not apply.
    """

    name: ClassVar[str] = "remote"
    runs_in: RunsIn = "trio"
    reads_solution_str: ClassVar[bool] = True

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        options = read_options(RemoteOptions, self.config, plugin=f"reward {self.name!r}")
        key = secret(options.api_key_env, plugin=f"reward {self.name!r}")
        self.max_concurrent = options.max_concurrent
        self.poster = Poster(options.url, api_key=key, max_retries=options.max_retries, reward=self.name)

    async def check_service(self) -> None:
        """Raise ConfigError if nobody listens at the URL."""
        await self.poster.check()

    async def score(self, attempt: Attempted) -> RewardResult | None:  # type: ignore[override]  # runs_in trio: async
        """Query the service.

        Raises:
            RewardError: it did not reply with a score.
        """
        reply = await self.poster.post(_body(attempt))
        if not isinstance(reply, dict) or "score" not in reply:
            raise RewardError(
                f"the service answered {str(reply)[:120]!r}; it must answer with a JSON object that has "
                "`score`"
            )
        return result_of(reply)


def _body(attempt: Attempted) -> dict[str, Any]:
    task = attempt.task
    messages = [
        {
            "role": message.role,
            "content": message.content,
            "reasoning": message.reasoning,
            "tool_calls": [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls],
        }
        for message in attempt.messages
    ]
    return {
        "data_source": task.data_source,
        "solution_str": attempt.solution_str,
        "ground_truth": task.ground_truth,
        "extra_info": {**task.extra_info, "environment_facts": attempt.facts}
        if attempt.facts
        else task.extra_info,
        "task_id": task.task_id,
        "outcome": attempt.outcome.value,
        "num_turns": attempt.num_turns,
        "num_response_tokens": attempt.num_response_tokens,
        "messages": messages,
    }
