"""One line of conversation within an attempt: its tokens, the segments that record them, and its remaining
budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.chat.conversation import Conversation
from agentrl.config.data import DataConfig, OverlongPrompts
from agentrl.errors import DataError
from agentrl.rollout.anchors import anchor
from agentrl.rollout.recorder import Segment, TrajectoryRecorder
from agentrl.types import Generation, Message, Turn

Adjust = Callable[[Generation], Generation]


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """`data.max_prompt_tokens` and the handling of longer prompts."""

    max_tokens: int
    overlong: OverlongPrompts

    @classmethod
    def of(cls, data: DataConfig) -> PromptLimits:
        """Return the limits of the config section `data`."""
        return cls(data.max_prompt_tokens, data.overlong_prompts)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """A sampled turn with its tokens, and the number of prompt tokens before them."""

    turn: Turn
    generation: Generation
    num_prompt_tokens: int


class ConversationLine:
    """A conversation and its recorded tokens.

    Invariant: recorded tokens and messages always agree, because context is recorded only together with the
    turn sampled after it. A segment never begins with an action token and always ends with one. If the
    template edits the history, the line continues in a new segment.
    """

    def __init__(
        self, conversation: Conversation, recorder: TrajectoryRecorder, *, task_id: str, owner: int = 0
    ) -> None:
        """owner: index of the attempt's conversation that the line belongs to."""
        self.conversation = conversation
        self.reported_states: list[str] = []  # environment states reported since the last turn
        self.max_tokens: int | None = None  # token budget of a segment; None until the first prompt is known
        self.is_sampling = False
        self.is_interrupted = False  # a turn began but was not recorded: only the same turn may follow
        self._task_id = task_id
        self._owner = owner
        self._recorder = recorder
        self._segment: Segment | None = None
        self._context: list[int] = []  # shown to the model but not recorded yet
        self._num_recorded_messages = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages, including those that the model will first see at the next turn."""
        return self.conversation.messages

    @property
    def recorded_messages(self) -> tuple[Message, ...]:
        """The messages whose tokens are recorded."""
        return self.conversation.messages[: self._num_recorded_messages]

    @property
    def unseen_messages(self) -> tuple[Message, ...]:
        """The messages after the recorded ones: answers of tools that did not fit, for example."""
        return self.conversation.messages[self._num_recorded_messages :]

    @property
    def num_known_experts(self) -> int:
        """Tokens at the beginning of the current segment whose experts are recorded."""
        return 0 if self._segment is None else self._segment.num_known_experts

    def fix_prompt(self, prompt: PromptLimits, max_response_tokens: int) -> None:
        """Shorten the first prompt according to `data.overlong_prompts`.

        The token budget of a segment is then the prompt's length plus `max_response_tokens`.

        Raises:
            DataError: the prompt is too long.
        """
        limit = prompt.max_tokens
        if prompt.overlong == "truncate_left":
            self.conversation.truncate_prompt(limit, "left")
        elif prompt.overlong == "truncate_right":
            self.conversation.truncate_prompt(limit, "right")
        elif prompt.overlong == "truncate_middle":
            self.conversation.truncate_prompt(limit, "middle")
        num_tokens = self.conversation.num_pending_tokens()
        if num_tokens > limit:
            raise DataError(f"the prompt has {num_tokens} tokens, but data.max_prompt_tokens is {limit}")
        self.max_tokens = num_tokens + max_response_tokens

    def turn(self) -> _Sampling:
        """Return a context that adds the pending messages to the prompt and gives all its tokens; the block
        samples a turn from them.

        If the block raises or is cancelled, the same turn can be sampled again. Else `record_turn` follows.
        """
        return _Sampling(self)

    def _show(self) -> Sequence[int]:
        """Add the pending messages to the prompt and return all its tokens."""
        assert not self.is_sampling, "one turn at a time"
        num_forks = self.conversation.num_forks
        block = self.conversation.next_prompt()
        if (
            self.conversation.num_forks > num_forks
        ):  # the history was edited: `block` extends no existing segment
            self._segment, self._context = None, []
        self._context = self._context + block if self._context else block
        self.is_sampling = self.is_interrupted = True
        return self.conversation.token_ids

    def record_turn(self, generation: Generation) -> Turn:
        """Record the turn that was sampled, and the context before it."""
        is_truncated = generation.finish_reason == "length"
        state = anchor(
            self._task_id, self.conversation.messages[self._num_recorded_messages :], self.reported_states
        )
        self.reported_states = []
        message = self.conversation.add_generation(generation.token_ids.tolist(), is_truncated=is_truncated)
        if self._segment is None:
            self._segment = self._recorder.begin_segment(self._owner)
            self._segment.num_prompt_tokens = self.conversation.num_prompt_tokens
        if self._context:
            self._segment.append_context(self._context)
            self._segment.images = tuple(self.conversation.images)
            self._context = []
        self._num_recorded_messages = len(self.conversation.messages)
        return Turn(self._segment.append_generation(generation, anchor=state), message, is_truncated)


class _Sampling:
    """The context of one turn. A class, because a generator would cost more than a quick turn."""

    __slots__ = ("_line",)

    def __init__(self, line: ConversationLine) -> None:
        self._line = line

    def __enter__(self) -> Sequence[int]:
        return self._line._show()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._line.is_sampling = False
        self._line.is_interrupted = error is not None
