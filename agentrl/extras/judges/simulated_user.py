"""A simulated user: another language model plays the user, with a persona, a goal and its own budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

import trio
from pydantic import Field, field_validator

from agentrl.errors import DataError, ServerError, ToolError
from agentrl.http.client import HttpClient, HttpReply
from agentrl.plugins import Interaction, InteractionReply
from agentrl.plugins.options import Options, read_options, secret
from agentrl.types import JsonObject, Message

INSTRUCTION = """\
You play the user in a conversation with an assistant. Stay in this role: never help, never speak for the assistant.
{persona}
What you want: {goal}
Write only what the user says next, in one short message. {ending}"""  # noqa: E501
ENDING = "When you have what you want, or see that you will not get it, write {stop_phrase} and nothing else."
ENDING_WITH_SUCCESS = (
    "When you have what you want, write {success_phrase} and nothing else; when you see that you will not "
    "get it, {stop_phrase}."
)
BEGIN = "(The conversation begins.)"
SILENCE = "(The assistant said nothing.)"
RETRY_STATUS = frozenset({408, 429, 500, 502, 503, 504})


class SimulatedUserOptions(Options):
    """Options in `agent.interaction_config.simulated_user`."""

    url: str = Field(
        description="An OpenAI-compatible server, an SGLang server for instance; without a path, /v1 is "
        "added."
    )
    model: str = Field("default", description="The model's name at that server.")
    api_key_env: str | None = Field(None, description="Environment variable that holds the API key.")
    persona: str = Field(
        "You are an ordinary person.", description="Who the user is; a row may say otherwise."
    )
    goal: str = Field("", description="What the user wants; a row may say otherwise.")
    instruction: str = Field(
        INSTRUCTION,
        description="System prompt; {persona}, {goal}, {ending} and the row's settings are filled in.",
    )
    stop_phrase: str = Field(
        "[DONE]", min_length=1, description="Said by the user, it ends the conversation."
    )
    success_phrase: str | None = Field(
        None, description="The same, and the final score is 1 instead of 0; None: no score."
    )
    max_turns: int = Field(8, ge=1, description="Maximum replies per conversation; then it ends.")
    max_tokens: int = Field(256, ge=1, description="Maximum tokens of one reply.")
    max_total_tokens: int = Field(
        4096, ge=1, description="Maximum tokens of all replies of a conversation; then it ends."
    )
    temperature: float = Field(0.7, ge=0, description="0 is greedy.")
    timeout_s: float = Field(
        20.0,
        gt=0,
        description="Deadline of one request; agent.interaction_timeout_s bounds the reply with its retries.",
    )
    num_retries: int = Field(2, ge=0, description="Retries if the server does not answer or is overloaded.")
    retry_pause_s: float = Field(
        0.5, ge=0, description="Pause before the first retry; it doubles with each retry."
    )

    @field_validator("url")
    @classmethod
    def _with_path(cls, url: str) -> str:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"{url!r} is not a URL; write it like http://127.0.0.1:30000/v1")
        return url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/v1"


class SimulatedUser(Interaction):
    """Lets another model write the user's messages. The conversation ends with its stop phrase or when its
    budget is spent.

    A row can set `persona`, `goal`, and any other text that `instruction` mentions in braces.
    """

    name: ClassVar[str] = "simulated_user"
    runtime = "trio"

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__(config)
        self._options = read_options(SimulatedUserOptions, self.config, plugin="interaction 'simulated_user'")
        key = secret(self._options.api_key_env, plugin="interaction 'simulated_user'")
        self._client = HttpClient(
            self._options.url, headers={"Authorization": f"Bearer {key}"} if key else None
        )

    async def start(self, **row: Any) -> None:
        """Write the system prompt.

        Raises:
            DataError: there is no goal, or the instruction mentions a name that neither row nor config
                defines.
        """
        options = self._options
        ending = ENDING if options.success_phrase is None else ENDING_WITH_SUCCESS
        phrases = {"stop_phrase": options.stop_phrase, "success_phrase": options.success_phrase}
        values = {
            "persona": options.persona,
            "goal": options.goal,
            "ending": ending.format(**phrases),
            **phrases,
            **row,
        }
        if not values["goal"] and "{goal}" in options.instruction:
            raise DataError(
                "interaction 'simulated_user' needs a `goal`, in interaction_kwargs or in its config"
            )
        try:
            self._system = options.instruction.format_map(values)
        except (KeyError, IndexError, ValueError) as error:
            raise DataError(
                f"interaction 'simulated_user': the instruction cannot be filled in: {error!r}"
            ) from error
        self._num_replies = 0
        self._num_tokens = 0
        self._has_succeeded = False

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Return the user's reply.

        Raises:
            ToolError: the server did not answer or rejected the request.
            ServerError: the last try could not reach the server.
        """
        options = self._options
        budget = min(options.max_tokens, options.max_total_tokens - self._num_tokens)
        if self._num_replies >= options.max_turns or budget < 1:
            return InteractionReply("", is_done=True, metrics={"user_budget_exhausted": 1.0})
        text, num_tokens = await self._ask(self._view(messages), budget)
        self._num_replies += 1
        self._num_tokens += num_tokens
        self._has_succeeded = bool(options.success_phrase and options.success_phrase in text)
        is_done = self._has_succeeded or options.stop_phrase in text or not text.strip()
        return InteractionReply(
            "" if is_done else text.strip(),
            is_done,
            metrics={"user_turns": 1.0, "user_tokens": float(num_tokens)},
        )

    async def score(self) -> float | None:
        return None if self._options.success_phrase is None else float(self._has_succeeded)

    async def finalize(self) -> None:
        await self._client.aclose()

    def _view(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        """Return the conversation from the user's side: roles are swapped, and tool messages are omitted.

        Consecutive messages of one role are joined, because many chat templates require alternating roles.
        """
        turns = [{"role": "system", "content": self._system}, {"role": "user", "content": BEGIN}]
        sides = {"user": "assistant", "assistant": "user"}
        for message in messages:
            if message.role not in sides or not (message.content.strip() or message is messages[-1]):
                continue
            role, text = sides[message.role], message.content.strip() or SILENCE
            if turns[-1]["role"] == role:
                turns[-1]["content"] += f"\n\n{text}"
            else:
                turns.append({"role": role, "content": text})
        return turns

    async def _ask(self, messages: list[dict[str, str]], max_tokens: int) -> tuple[str, int]:
        """Return the reply's text and its number of tokens."""
        body = {
            "model": self._options.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": self._options.temperature,
        }
        pause_s = self._options.retry_pause_s
        for _ in range(self._options.num_retries):
            with trio.move_on_after(self._options.timeout_s):
                try:
                    reply = await self._client.request("POST", "/chat/completions", json=body)
                except ServerError:
                    pass
                else:
                    if reply.status not in RETRY_STATUS:
                        return _read(reply, max_tokens)
            await trio.sleep(pause_s)
            pause_s *= 2
        with trio.move_on_after(self._options.timeout_s):
            return _read(await self._client.request("POST", "/chat/completions", json=body), max_tokens)
        raise ToolError(f"the simulated user did not answer within {self._options.timeout_s:g} s")


def _read(reply: HttpReply, max_tokens: int) -> tuple[str, int]:
    if reply.status != 200:
        raise ToolError(
            f"the simulated user's server answered {reply.status}: "
            f"{reply.body[:200].decode(errors='replace')}"
        )
    data = reply.json()
    try:
        text = data["choices"][0]["message"]["content"] or ""
    except (KeyError, IndexError, TypeError) as error:
        raise ToolError(
            f"the simulated user's server sent a reply that is not a chat completion: {str(data)[:200]}"
        ) from error
    usage = data.get("usage") if isinstance(data, Mapping) else None
    counted = usage.get("completion_tokens") if isinstance(usage, Mapping) else None
    # Without a token count, assume the maximum, so that the budget is never exceeded.
    return str(text), counted if isinstance(counted, int) else max_tokens
