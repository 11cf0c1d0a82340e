"""Training data without rollouts: conversations to imitate (SFT) and preference pairs (reward models)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.chat import Chat
from agentrl.chat.replay import Replay
from agentrl.data.files import RawRow, file_ids, open_rows
from agentrl.data.image_files import ImageBounds, ImageFolder
from agentrl.data.row_images import NO_IMAGES, RowImages
from agentrl.data.row_place import RowPlace
from agentrl.data.row_values import decoded, plain, read_object, shortened, structure
from agentrl.data.rows import column, messages_or_text, optional_column, read_list, read_messages
from agentrl.errors import ConfigError, DataError, PluginError, concerning
from agentrl.extras.supervised.config import RMDataConfig, SFTDataConfig
from agentrl.learner.batch import Sample, images_between
from agentrl.plugins import Plugins
from agentrl.types import JsonObject, Message

T = TypeVar("T")

MARKS = ("loss_mask", "step_loss_mask", "loss", "loss_scale", "weight", "train", "training", "trainable")
"""Keys of messages that say whether a message is learned: of verl, slime, ms-swift (loss, loss_scale), OpenAI
and Mistral (weight), axolotl (train, training) and tinker.
"""
_MARK_LIKE = re.compile("loss|mask|train|weight|skip")
"""In keys that would say the same in another way, such as axolotl's `train_detail`, which chooses parts."""


@dataclass(frozen=True, slots=True, eq=False)
class Examples:
    """Samples in the order of their rows, and counts of rows that were left out or cut.

    `index` of the samples counts them from 0. num_dropped: rows left out as too long. num_truncated: rows
    that were cut. num_unlearned: rows left out because their MARKS exclude every message.
    """

    samples: tuple[Sample, ...]
    num_dropped: int = 0
    num_truncated: int = 0
    num_unlearned: int = 0

    def summary(self, noun: str) -> str:
        """Return a line for the console, for example `600 conversations, 3 left out as too long`."""
        parts = [f"{len(self.samples):,} {noun}{'' if len(self.samples) == 1 else 's'}"]
        parts += [f"{self.num_dropped:,} left out as too long"] if self.num_dropped else []
        parts += [f"{self.num_truncated:,} cut"] if self.num_truncated else []
        parts += [f"{self.num_unlearned:,} left out without a message to learn"] if self.num_unlearned else []
        return ", ".join(parts)


class ExampleRenderer:
    """Renders the messages and tools of a row to tokens. Errors name the row."""

    def __init__(self, chat: Chat, plugins: Plugins, *, tools_key: str, kwargs_key: str) -> None:
        """`tools_key`, `kwargs_key`: columns of a row's tools and of its arguments for the chat template."""
        self._chat = chat
        self._plugins = plugins
        self._tools_key = tools_key
        self._kwargs_key = kwargs_key
        self._schemas: dict[str, JsonObject] = {}

    def render(self, row: RawRow, place: RowPlace, messages: Sequence[Message]) -> Replay:
        """Return the tokens of a conversation, with each assistant turn as the model would have sampled it.

        Raises:
            DataError, ConfigError: there is no assistant turn, the chat template cannot render one, or it
                does not show the row's tools, or read the row's arguments.
        """
        schemas = [self._schema(tool, place) for tool in self._tools(row, place)]
        kwargs = read_object(optional_column(row, self._kwargs_key, place), place, self._kwargs_key)
        try:
            with concerning(self._kwargs_key):
                chat = self._chat.with_template_kwargs(kwargs)
            chat.check_tools(schemas, messages)
            return chat.render_training(messages, schemas)
        except (DataError, ConfigError) as error:
            raise type(error)(f"{place}: {error}") from error

    def _tools(self, row: RawRow, place: RowPlace) -> Sequence[Any]:
        value = decoded(row.get(self._tools_key), place, self._tools_key)
        if value is not None and not isinstance(value, list):
            raise place.error(self._tools_key, f"must be a list of tool names or schemas, is {value!r}")
        return [structure(plain(tool, place, self._tools_key)) for tool in value or ()]

    def _schema(self, tool: Any, place: RowPlace) -> JsonObject:
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping):
            return tool
        if isinstance(tool, Mapping) and isinstance(tool.get("name"), str):
            function = {key: value for key, value in tool.items() if key != "type"}
            return {"type": "function", "function": function}
        if not isinstance(tool, str):
            raise place.error(
                self._tools_key,
                "must contain names of tools, or schemas {type, function} or {name, parameters}, contains "
                f"{tool!r}",
            )
        if tool not in self._schemas:
            try:
                self._schemas[tool] = self._plugins.tools.get(tool)().schema()
            except PluginError as error:
                raise PluginError(f"{place}: field {self._tools_key!r}: {error}") from error
        return self._schemas[tool]


# ---------------------------------------------------------------------------------------------- conversations


def read_conversations(
    files: Sequence[str], config: SFTDataConfig, chat: Chat, plugins: Plugins, *, images: Path | None = None
) -> Examples:
    """Render every conversation of `files`. The loss covers what the assistant wrote, tool calls included,
    except messages that MARKS exclude.

    With `prompt_key` and `response_key` it covers only the response: assistant messages of the prompt are
    context. Images are stored in the folder `images`; None: they are only checked.

    Raises:
        UserError: a malformed row, an unknown tool, or no conversation that fits `data.max_tokens`.
    """
    renderer = ExampleRenderer(
        chat, plugins, tools_key=config.tools_key, kwargs_key=config.chat_template_kwargs_key
    )

    bounds = ImageBounds(config.images.max_bytes, config.images.max_pixels)
    folder = ImageFolder(bounds, images)

    def build(row: RawRow, place: RowPlace) -> Replay:
        key = config.images.key
        shown = RowImages(row.get(key), place, key, folder, max_images=config.images.max_images)
        if config.prompt_key is None or config.response_key is None:
            value = column(row, config.messages_key, place, "data.messages_key")
            messages = read_messages(value, place, config.messages_key, shown)
            marks = read_marks(value, place, config.messages_key)
            return _learning(renderer.render(row, place, messages), [mark is not False for mark in marks])
        asked = messages_or_text(column(row, config.prompt_key, place, "data.prompt_key"))
        prompt = _prompt(asked, place, config.prompt_key, shown)
        marks = [] if isinstance(asked, str) else read_marks(asked, place, config.prompt_key)
        if any(marks):
            problem = f"marks a message to learn, but only {config.response_key!r} is learned"
            raise place.error(config.prompt_key, problem)
        response = column(row, config.response_key, place, "data.response_key")
        if not isinstance(response, str):
            raise place.error(config.response_key, f"must be text, is {shortened(response)}")
        replay = renderer.render(row, place, [*prompt, Message("assistant", response)])
        return _learning(replay, [*(False for _ in marks), True])

    examples = _collect(files, build, lambda index, replay: _imitate(index, replay, config))
    return _some(examples, files, what="conversation", max_tokens=config.max_tokens)


def _imitate(index: int, replay: Replay, config: SFTDataConfig) -> tuple[Sample | None, bool]:
    is_long = len(replay.token_ids) > config.max_tokens
    if is_long and config.overlong == "drop":
        return None, True
    end = config.max_tokens
    # Not within an image: all its placeholders are shown, or none.
    end = next((i.position for i in replay.images if i.position < end < i.position + i.num_tokens), end)
    starts = tuple(start for start in replay.segment_starts if start < end)
    sample = Sample.supervised(
        index, replay.token_ids[:end], replay.mask[:end], starts, images_between(replay.images, 0, end)
    )
    return (sample if sample.loss_mask.any() else None), is_long


def _learning(replay: Replay, is_learned: Sequence[bool]) -> Replay:
    """Return the replay with the other turns as context; `is_learned` has one value per turn."""
    learned = np.array([*is_learned, False])  # the last is of turn -1, the context
    return dataclasses.replace(replay, turn_ids=np.where(learned[replay.turn_ids], replay.turn_ids, -1))


def read_marks(value: Any, place: RowPlace, field: str) -> list[bool | None]:
    """Return for each assistant message of a field whether it is to be learned; None: the row does not say.

    Raises:
        DataError: a mark is not 0 or 1, contradicts another, or is for a part of a message; or a message of
            another role is to be learned.
    """
    marks: list[bool | None] = []
    for index, message in enumerate(read_list(value, place, field)):
        mark = _mark(message, place, f"{field}[{index}]")
        if message.get("role") == "assistant":
            marks.append(mark)
        elif mark:
            problem = f"is marked to be learned, but has the role {message.get('role')}; only assistant is"
            raise place.error(f"{field}[{index}]", problem)
    return marks


def _mark(message: Mapping[str, Any], place: RowPlace, field: str) -> bool | None:
    for key, value in message.items():
        if value is not None and key not in MARKS and _MARK_LIKE.search(key):
            raise place.error(
                f"{field}.{key}", "is not supported; mark whole messages with loss_mask, 0 or 1"
            )
    given = {key: message[key] for key in MARKS if message.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            problem = (
                f"must be 0 or 1 (false or true), is {shortened(value)}; other weights are not supported"
            )
            raise place.error(f"{field}.{key}", problem)
    if len(set(given.values())) > 1:
        shown = ", ".join(f"{key} {value}" for key, value in given.items())
        raise place.error(field, f"is marked to be learned, and not to be: {shown}")
    return bool(next(iter(given.values()))) if given else None


# ------------------------------------------------------------------------------------------------------ pairs


def read_pairs(files: Sequence[str], config: RMDataConfig, chat: Chat, plugins: Plugins) -> Examples:
    """Render every pair as ONE sample of two segments: the chosen conversation, then the rejected one.

    Segments do not attend to each other, but a sample is never split, so both scores of a pair are always in
    one microbatch. The only loss token is the sample's last, so that losses and counts are per pair.

    Raises:
        UserError: a malformed row, an unknown tool, or no pair that fits `data.max_tokens`.
    """
    renderer = ExampleRenderer(
        chat, plugins, tools_key=config.tools_key, kwargs_key=config.chat_template_kwargs_key
    )

    def build(row: RawRow, place: RowPlace) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        value = messages_or_text(optional_column(row, config.prompt_key, place))
        prompt = () if value is None else _prompt(value, place, config.prompt_key)
        replays = (
            renderer.render(row, place, _answered(prompt, column(row, key, place, setting), place, key))
            for key, setting in (
                (config.chosen_key, "data.chosen_key"),
                (config.rejected_key, "data.rejected_key"),
            )
        )
        # The last segment is the final conversation: if the template edits the history, earlier segments
        # contain the conversation before the edit.
        chosen, rejected = (replay.token_ids[replay.segment_starts[-1] :] for replay in replays)
        return chosen, rejected

    examples = _collect(files, build, lambda index, pair: _compare(index, pair, config))
    return _some(examples, files, what="pair", max_tokens=config.max_tokens)


def _compare(
    index: int, pair: tuple[NDArray[np.int32], NDArray[np.int32]], config: RMDataConfig
) -> tuple[Sample | None, bool]:
    is_long = max(map(len, pair)) > config.max_tokens
    if is_long and config.overlong == "drop":
        return None, True
    # The score is read at the last token, so truncation cuts the beginning.
    chosen, rejected = (ids[-config.max_tokens :] for ids in pair)
    return Sample.pair(index, chosen, rejected), is_long


def _answered(prompt: Sequence[Message], value: Any, place: RowPlace, field: str) -> list[Message]:
    """Return prompt and answer.

    An answer given as messages may repeat the prompt, as in many published datasets.
    """
    value = messages_or_text(value)
    if isinstance(value, str):
        if not prompt:
            raise place.error(
                field,
                "is text without a prompt; set data.prompt_key to the column of the prompt, or use messages",
            )
        return [*prompt, Message("assistant", value)]
    messages = read_messages(value, place, field)
    if messages[-1].role != "assistant":
        raise place.error(
            field, f"must end with a message of the assistant, ends with a message of {messages[-1].role}"
        )
    if False in read_marks(value, place, field):
        problem = "marks a message that is not learned, but a pair is scored as a whole; remove the mark"
        raise place.error(field, problem)
    return list(messages) if messages[: len(prompt)] == tuple(prompt) else [*prompt, *messages]


# ------------------------------------------------------------------------------------------------------- rows


def _collect(
    files: Sequence[str],
    build: Callable[[RawRow, RowPlace], T],
    fit: Callable[[int, T], tuple[Sample | None, bool]],
) -> Examples:
    samples: list[Sample] = []
    num_dropped = num_truncated = num_unlearned = 0
    for row, place in _rows(files):
        sample, is_long = fit(len(samples), build(row, place))
        if sample is None:
            num_dropped += is_long
            num_unlearned += not is_long
            continue
        num_truncated += is_long
        samples.append(sample)
    return Examples(tuple(samples), num_dropped, num_truncated, num_unlearned)


def _rows(files: Sequence[str]) -> Iterator[tuple[RawRow, RowPlace]]:
    for path, file_id in zip(files, file_ids(files), strict=True):
        file = open_rows(path)
        for index, row in enumerate(file.rows(len(file))):
            yield row, RowPlace(path, file_id, index, file.line(index))


def _some(examples: Examples, files: Sequence[str], *, what: str, max_tokens: int) -> Examples:
    if not examples.samples:
        num_long, num_unlearned = examples.num_dropped, examples.num_unlearned
        causes = [f"all {num_long} exceed data.max_tokens={max_tokens}; raise it"] if num_long else []
        causes += [f"{num_unlearned} have no message to learn"] if num_unlearned else []
        raise DataError(f"no {what} to train on: {'; '.join(causes) or f'{list(files)} hold no rows'}")
    return examples


def _prompt(value: Any, place: RowPlace, field: str, images: RowImages = NO_IMAGES) -> tuple[Message, ...]:
    if value is None:
        raise place.error(field, "must be text or messages, is missing")
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    return read_messages(messages, place, field, images)
