"""Renders finished attempts for a reward model, with its own chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.chat import Chat
from agentrl.chat.renderer import Tools
from agentrl.config.agent import AgentConfig
from agentrl.config.reward_model import RewardModelConfig
from agentrl.data.checked_dataset import OfferedTools
from agentrl.errors import ConfigError
from agentrl.plugins import Attempted, Plugins
from agentrl.rollout.limits import model_limits
from agentrl.types import Message, ToolCall


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """A rendered conversation. token_ids: i32[T]. is_truncated: the beginning was cut off."""

    token_ids: NDArray[np.int32]
    is_truncated: bool


class Conversations:
    """Renders attempts up to their last assistant message, with the tool schemas that the policy saw."""

    def __init__(self, config: RewardModelConfig, agent: AgentConfig, plugins: Plugins) -> None:
        """Load the tokenizer and the chat template, and test them on a short conversation.

        Raises:
            ConfigError: there is no template, it refuses messages that a run may have, or `max_tokens`
                exceeds the model's positions.
        """
        try:
            self._chat = Chat.of(config.model)
        except ConfigError as error:
            raise _of_section(error) from error
        _, positions = model_limits(config.model, self._chat)
        if config.max_tokens is not None and positions is not None and config.max_tokens > positions:
            raise ConfigError(
                f"reward_model.max_tokens={config.max_tokens} exceeds the {positions} positions of "
                "reward_model.model.path"
            )
        self._max_tokens = config.max_tokens or positions
        self._config = config
        self._agent = agent
        self._plugins = plugins
        self._offered = OfferedTools(agent, plugins)
        self._tokens(_PLAIN, [])
        if agent.tools or plugins.served_tools:
            self._tokens(_WITH_TOOLS, [])

    def render(self, attempt: Attempted) -> Rendered | None:
        """Return an attempt's conversation, or None.

        None if it has no assistant message, or is too long and `overlong` is skip.

        It ends with the last assistant message; a later tool result, which nobody answered, is left out. The
        template closes a truncated message as if it were complete. Of parallel conversations the first is
        rendered, of edited histories the last.

        Raises:
            ConfigError: the chat template refuses the conversation, or it shows images.
        """
        if any(message.images for message in attempt.messages):
            raise ConfigError(
                f"reward_model: the conversation of {attempt.task.task_id} shows images, which reward models "
                "do not see; use another reward for such rows"
            )
        last = next(
            (i for i in reversed(range(len(attempt.messages))) if attempt.messages[i].role == "assistant"),
            None,
        )
        if last is None:
            return None
        agent = self._plugins.agents.create(attempt.task.agent_name, self._agent.agent_config)
        tools = self._offered.schemas(attempt.task) if agent.template_shows_tools else []
        token_ids = self._tokens(attempt.messages[: last + 1], tools)
        is_long = self._max_tokens is not None and len(token_ids) > self._max_tokens
        if is_long and self._config.overlong == "skip":
            return None
        # The score is read at the last token, so truncation cuts the beginning.
        return Rendered(
            token_ids[-self._max_tokens :] if is_long and self._max_tokens else token_ids, is_long
        )

    def _tokens(self, messages: Sequence[Message], tools: Tools) -> NDArray[np.int32]:
        try:
            if self._config.render == "template":
                return np.array(self._chat.render_whole(messages, tools), np.int32)
            replay = self._chat.render_training(messages, tools)
        except ConfigError as error:
            raise _of_section(error) from error
        return replay.token_ids[replay.segment_starts[-1] :]


def _of_section(error: ConfigError) -> ConfigError:
    return ConfigError(f"reward_model: {error}")


_CALL = ToolCall("call00000", "search", {"query": "?"})
_PLAIN = (Message("user", "?"), Message("assistant", "!"), Message("user", "?"), Message("assistant", "!"))
_WITH_TOOLS = (
    Message("user", "?"),
    Message("assistant", "", (_CALL,)),
    Message("tool", "!", tool_call_id=_CALL.id, name=_CALL.name),
    Message("assistant", "!"),
)
