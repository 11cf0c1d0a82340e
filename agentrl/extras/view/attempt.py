"""One attempt: its conversation, its tokens with what is known of each, and its siblings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from agentrl.data.trajectories import decode
from agentrl.errors import DataError
from agentrl.extras.view.columns import OpenFile
from agentrl.extras.view.sources import AttemptFile, Signature, ViewSource, signature_of
from agentrl.extras.view.token_texts import TokenTexts
from agentrl.types import SCORED_OUTCOMES, ConversationRecord, Message, Trajectory

MAX_TEXT = 20_000
"""Characters of one text that are sent at once; the page asks for the rest."""
MAX_LINE = 90
MAX_TOKENS = 4_000
"""Tokens that are sent at once."""
MAX_SIBLINGS = 256
MAX_KEPT_BYTES = 32 * 2**20
MAX_KEPT_ROWS = 4096
"""Of a file that is kept in memory while its attempts are looked at."""


@dataclass(frozen=True, slots=True)
class ShownText:
    """The beginning of a text. chars: of the whole text."""

    text: str
    chars: int

    @classmethod
    def of(cls, text: str, most: int = MAX_TEXT) -> ShownText:
        return cls(text[:most], len(text))


@dataclass(frozen=True, slots=True)
class ShownCall:
    """A tool call. arguments: JSON text; None: the model's call could not be read, `error` says why."""

    id: str
    name: str
    arguments: ShownText | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message. turn: of an assistant's message that was sampled, counted from 0; None: of the prompt, or
    said by an opponent. conversation: the name of the one that it belongs to; None: there is only one.
    """

    index: int
    role: str
    name: str | None
    content: ShownText
    reasoning: ShownText
    calls: tuple[ShownCall, ...]
    call_id: str | None
    turn: int | None
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class ShownReward:
    """A reward and the token and turn on which it lies."""

    name: str
    value: float
    position: int
    turn: int


@dataclass(frozen=True, slots=True)
class ShownSegment:
    """A row of tokens that only grew, end excluded, and the turns sampled in it. conversation: its name;
    None: there is only one.
    """

    start: int
    end: int
    turns: tuple[int, ...]
    conversation: str | None = None


@dataclass(frozen=True, slots=True)
class Sibling:
    """An attempt of the group, or the attempt itself.

    margin: reward minus the mean of the group. last: end of the last thing that the model said.
    differs_at: index of the first message that is not the attempt's own; None: all are the same.
    """

    key: str
    member: int
    is_greedy: bool
    outcome: str
    reward: float | None
    margin: float | None
    num_turns: int
    num_sampled: int
    last: str
    differs_at: int | None


@dataclass(frozen=True, slots=True)
class ShownAttempt:
    """Everything about an attempt but its tokens.

    has_tokens: False for failures of which only the report was kept.
    """

    key: str
    step: int | None
    set: str
    policy: str | None
    task: str
    group: int
    member: int
    source: str
    agent: str
    outcome: str
    is_scored: bool
    reward: float | None
    failure: dict[str, Any] | None
    became: str | None
    metrics: dict[str, float]
    extra: str
    messages: tuple[ShownMessage, ...]
    rewards: tuple[ShownReward, ...]
    segments: tuple[ShownSegment, ...]
    siblings: tuple[Sibling, ...]
    learned_by: int | None
    versions: tuple[int, ...]
    num_tokens: int
    num_sampled: int
    num_prompt: int
    has_tokens: bool
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class ShownTokens:
    """Tokens `start` to `start + len(ids)` of an attempt of `total`; lists are aligned with `ids`.

    texts: None without a tokenizer. logprobs, versions: None of tokens that were not sampled.
    advantages: None if they were not computed. ratios: proximal / behavior; None if the run stored none.
    special: places of tokens that no text is split into.
    """

    start: int
    total: int
    ids: list[int]
    texts: list[str] | None
    mask: list[int]
    logprobs: list[float | None]
    versions: list[int | None]
    turns: list[int]
    special: list[int]
    advantages: list[float] | None = None
    ratios: list[float | None] | None = None


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """A row of a file: the trajectory, None of a failure that has only its report, and its other columns."""

    key: str
    file: AttemptFile
    trajectory: Trajectory | None
    others: dict[str, Any]


class AttemptReader:
    """Reads single attempts of a source. A key is the name of a file, a colon, and the row.

    A page asks for an attempt several times, and for its siblings: the last file is kept if it is small.
    """

    def __init__(self, source: ViewSource) -> None:
        self._source = source
        self._last: tuple[str, Signature | None, tuple[ReadAttempt, ...]] | None = None

    def read(self, key: str) -> ReadAttempt:
        """Return the attempt with this key.

        Raises:
            DataError: there is no such attempt.
        """
        file, row = self._find(key)
        try:
            if (whole := self._whole(file)) is not None and row < len(whole):
                return whole[row]
            with OpenFile(file) as opened:
                return _read(file, opened.row(row), [key])[0]
        except FileNotFoundError:
            raise DataError(f"attempt {key!r}: its file is gone") from None

    def group(self, stored: ReadAttempt) -> list[tuple[str, Trajectory]]:
        """Return the attempts of the same group in the same file, in the order of members, with their keys.

        An evaluation and a file of the user may have thousands of attempts at one task.
        """
        own = stored.trajectory
        if own is None:
            return []
        if (whole := self._whole(stored.file)) is not None:
            found = [
                one for one in whole if one.trajectory is not None and one.trajectory.group_id == own.group_id
            ]
        else:
            with OpenFile(stored.file) as opened:
                rows = np.flatnonzero(opened.numbers(["group"])["group"] == own.group_id)[
                    :MAX_SIBLINGS
                ].tolist()
                found = _read(
                    stored.file, opened.rows_at(rows), [f"{stored.file.name}:{row}" for row in rows]
                )
        members = [(one.key, one.trajectory) for one in found if one.trajectory is not None]
        same = [member for member in members if member[1].task_id == own.task_id][:MAX_SIBLINGS]
        return sorted(same, key=lambda member: (member[1].is_greedy, member[1].member))

    def _whole(self, file: AttemptFile) -> tuple[ReadAttempt, ...] | None:
        """Return all attempts of a small file of trajectories."""
        signature, last = signature_of(file), self._last
        if last is not None and last[:2] == (file.name, signature):
            return last[2]
        if file.set == "failed":
            return None
        with OpenFile(file) as opened:
            if opened.num_bytes > MAX_KEPT_BYTES or opened.num_rows > MAX_KEPT_ROWS or not opened.num_rows:
                return None
            batch = opened.rows_at(range(opened.num_rows))
        found = tuple(_read(file, batch, [f"{file.name}:{row}" for row in range(batch.num_rows)]))
        self._last = (file.name, signature, found)
        return found

    def _find(self, key: str) -> tuple[AttemptFile, int]:
        name, _, row = key.rpartition(":")
        # the name is only compared: no path is made of what a browser sends
        file = next((file for file in self._source.files() if file.name == name), None)
        if file is None or not row.isascii() or not row.isdigit():
            raise DataError(f"there is no attempt {key!r}; a key is a file's name, a colon and a row")
        return file, int(row)


def _read(file: AttemptFile, batch: pa.RecordBatch, keys: Sequence[str]) -> list[ReadAttempt]:
    if file.set == "failed":
        return [ReadAttempt(key, file, None, row) for key, row in zip(keys, batch.to_pylist(), strict=True)]
    names = [name for name in ("step", "learned_by") if name in batch.schema.names]
    others = batch.select(names).to_pylist() if names else [{} for _ in keys]
    return [
        ReadAttempt(key, file, trajectory, other)
        for key, trajectory, other in zip(keys, decode(plain(batch)), others, strict=True)
    ]


def plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch with plain texts in place of codes."""
    columns, fields = [], []
    for column, field in zip(batch.columns, batch.schema, strict=True):
        if pa.types.is_dictionary(field.type):
            column, field = column.cast(field.type.value_type), field.with_type(field.type.value_type)
        elif pa.types.is_map(field.type) and pa.types.is_dictionary(field.type.key_type):
            to = pa.map_(pa.string(), pa.float64())
            column, field = column.cast(to), field.with_type(to)
        columns.append(column)
        fields.append(field)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields, metadata=batch.schema.metadata))


def show(reader: AttemptReader, key: str) -> ShownAttempt:
    """Return what the page of an attempt shows.

    Raises:
        DataError: there is no such attempt.
    """
    stored = reader.read(key)
    if stored.trajectory is None:
        return _show_failure(stored)
    own = stored.trajectory
    is_scored = own.outcome in SCORED_OUTCOMES
    failure = None
    if own.failure is not None:
        failure = _failure(
            own.failure.text, own.failure.error, own.failure.place, own.failure.traceback,
            None if own.failure.plugin is None else (own.failure.plugin.kind, own.failure.plugin.name),
        )  # fmt: skip
    actions = np.flatnonzero(own.action_mask)
    return ShownAttempt(
        key=key,
        step=stored.others.get("step", stored.file.step),
        set=stored.file.set,
        policy=stored.file.policy,
        task=own.task_id,
        group=own.group_id,
        member=own.member,
        source=own.data_source,
        agent=own.agent_name,
        outcome=own.outcome.value,
        is_scored=is_scored,
        reward=own.reward if is_scored else None,
        failure=failure,
        became=None,
        metrics=dict(own.metrics),
        extra=json.dumps(own.extra_info, indent=1, ensure_ascii=False)[:MAX_TEXT],
        messages=shown_messages(own),
        rewards=tuple(
            ShownReward(event.name, event.value, event.position, int(own.turn_ids[event.position]))
            for event in own.rewards
        ),
        segments=_segments(own),
        siblings=_siblings(reader.group(stored), own),
        learned_by=stored.others.get("learned_by"),
        versions=tuple(np.unique(own.versions[own.action_mask]).tolist()),
        num_tokens=own.num_tokens,
        num_sampled=own.num_action_tokens,
        num_prompt=int(actions[0]) if len(actions) else own.num_tokens,
        has_tokens=True,
        is_greedy=own.is_greedy,
    )


def all_messages(own: Trajectory) -> tuple[Message, ...]:
    """Return the messages of the attempt; of several conversations, one after the other."""
    if not own.conversations:
        return own.messages
    return tuple(message for one in own.conversations for message in one.messages)


def shown_messages(own: Trajectory) -> tuple[ShownMessage, ...]:
    """Return `all_messages`; the last ones of the assistant in each conversation are the sampled turns."""
    if own.conversations:
        return tuple(_of_conversations(own))
    num_turns = int(own.turn_ids.max(initial=-1)) + 1
    said = [index for index, message in enumerate(own.messages) if message.role == "assistant"]
    turns = {index: turn for turn, index in enumerate(said[max(0, len(said) - num_turns) :])}
    return tuple(_message(i, message, turns.get(i)) for i, message in enumerate(own.messages))


def _of_conversations(own: Trajectory) -> Iterator[ShownMessage]:
    segments, start = _segments(own), 0
    for number, one in enumerate(own.conversations):
        owned = zip(segments, own.segment_conversations, strict=True)
        sampled = sorted({turn for segment, owner in owned if owner == number for turn in segment.turns})
        said = [index for index, message in enumerate(one.messages) if message.role == "assistant"]
        turns = dict(zip(reversed(said), reversed(sampled), strict=False))
        for index, message in enumerate(one.messages):
            yield _message(start + index, message, turns.get(index), _title(one))
        start += len(one.messages)


def _title(one: ConversationRecord) -> str:
    if one.opponent is None:
        return one.name
    versions = [version for version in one.opponent_versions if version]  # 0: as it was started
    return f"{one.name} (opponent {', version '.join([one.opponent, *map(str, versions)])})"


def _message(index: int, message: Message, turn: int | None, conversation: str | None = None) -> ShownMessage:
    calls = tuple(
        ShownCall(
            call.id,
            call.name,
            None if call.arguments is None else ShownText.of(_arguments_text(call.arguments)),
            call.error,
        )
        for call in message.tool_calls
    )
    content, reasoning = ShownText.of(message.content), ShownText.of(message.reasoning)
    return ShownMessage(
        index, message.role, message.name, content, reasoning, calls, message.tool_call_id, turn, conversation
    )


def _segments(own: Trajectory) -> tuple[ShownSegment, ...]:
    ends = (*own.segment_starts[1:], own.num_tokens)
    owners: list[str | None] = [own.conversations[i].name for i in own.segment_conversations]
    return tuple(
        ShownSegment(
            start, end, tuple(np.unique(own.turn_ids[start:end][own.action_mask[start:end]]).tolist()), owner
        )
        for start, end, owner in zip(own.segment_starts, ends, owners or [None] * len(ends), strict=True)
    )


def _siblings(group: Sequence[tuple[str, Trajectory]], own: Trajectory) -> tuple[Sibling, ...]:
    counted = [t.reward for _, t in group if t.outcome in SCORED_OUTCOMES and not t.is_greedy]
    mean = sum(counted) / len(counted) if counted else None
    return tuple(_sibling(key, member, own, mean) for key, member in group)


def _sibling(key: str, one: Trajectory, own: Trajectory, mean: float | None) -> Sibling:
    reward = one.reward if one.outcome in SCORED_OUTCOMES else None
    said, own_said = all_messages(one), all_messages(own)
    pairs = enumerate(zip(said, own_said, strict=False))
    differs = next((index for index, (a, b) in pairs if a != b), None)
    if differs is None and len(said) != len(own_said):
        differs = min(len(said), len(own_said))
    last = next((message.content for message in reversed(one.messages) if message.role == "assistant"), "")
    return Sibling(
        key,
        one.member,
        one.is_greedy,
        one.outcome.value,
        reward,
        None if reward is None or mean is None else reward - mean,
        int(one.turn_ids.max(initial=-1)) + 1,
        one.num_action_tokens,
        last.strip()[-160:],
        differs,
    )


def _show_failure(stored: ReadAttempt) -> ShownAttempt:
    row = stored.others
    plugin = None if row["kind"] is None else (row["kind"], row["plugin"])
    return ShownAttempt(
        key=stored.key,
        step=row["step"],
        set=stored.file.set,
        policy=None,
        task=row["task_id"],
        group=row["group_id"],
        member=row["member"],
        source=row["data_source"],
        agent=row["agent_name"],
        outcome=row["outcome"],
        is_scored=False,
        reward=None,
        failure=_failure(row["text"], row["error"], row["place"], row["traceback"], plugin),
        became=row["became"],
        metrics={},
        extra=f"{row['time']:%Y-%m-%d %H:%M:%S} UTC",
        messages=(),
        rewards=(),
        segments=(),
        siblings=(),
        learned_by=None,
        versions=(row["version"],),
        num_tokens=0,
        num_sampled=0,
        num_prompt=0,
        has_tokens=False,
        is_greedy=False,
    )


def _failure(
    text: str, error: str, place: str, traceback: str, plugin: tuple[str, str] | None
) -> dict[str, Any]:
    return {
        "text": text[:MAX_TEXT],
        "error": error,
        "place": place,
        "traceback": traceback[:MAX_TEXT],
        "plugin": None if plugin is None else f"{plugin[0]} {plugin[1]}",
    }


# ------------------------------------------------------------------------------------------- tokens and texts


def show_tokens(
    own: Trajectory,
    texts: TokenTexts | None,
    *,
    start: int = 0,
    count: int = MAX_TOKENS,
    advantages: Sequence[float] | None = None,
    proximal: NDArray[np.float32] | None = None,
) -> ShownTokens:
    """Return tokens from `start` on, at most MAX_TOKENS. proximal: see `read_proximal`."""
    end = min(start + min(count, MAX_TOKENS), own.num_tokens)
    ids = own.token_ids[start:end].tolist()
    mask = own.action_mask[start:end].tolist()
    logprobs = own.behavior_logprobs[start:end].tolist()
    versions = own.versions[start:end].tolist()
    return ShownTokens(
        start=start,
        total=own.num_tokens,
        ids=ids,
        texts=None if texts is None else _with_image_marks(own, texts.of(ids), start),
        mask=[int(sampled) for sampled in mask],
        logprobs=[float(f"{p:.5g}") if is_own else None for p, is_own in zip(logprobs, mask, strict=True)],
        versions=[version if is_own else None for version, is_own in zip(versions, mask, strict=True)],
        turns=own.turn_ids[start:end].tolist(),
        special=[] if texts is None else [i for i, one in enumerate(ids) if texts.is_special(one)],
        advantages=None if advantages is None else [float(f"{a:.5g}") for a in advantages[start:end]],
        ratios=None if proximal is None else _ratios(own, proximal)[start:end],
    )


def _with_image_marks(own: Trajectory, texts: list[str], start: int) -> list[str]:
    """Return the texts of the tokens from `start` on, with one mark in place of an image's placeholders."""
    for image in own.images:
        first, last = image.position - start, image.position + image.num_tokens - start
        for place in range(max(first, 0), min(last, len(texts))):
            texts[place] = f"[image {image.columns}x{image.rows}]" if place == max(first, 0) else ""
    return texts


def _ratios(own: Trajectory, proximal: NDArray[np.float32]) -> list[float | None]:
    """Return proximal / behavior of each token; None where it is not known."""
    ratios: list[float | None] = [None] * own.num_tokens
    known = np.exp(np.clip(proximal - own.behavior_logprobs[own.action_mask], -700, 700, dtype=np.float64))
    for place, ratio in zip(np.flatnonzero(own.action_mask).tolist(), known.tolist(), strict=True):
        ratios[place] = float(f"{ratio:.5g}") if math.isfinite(ratio) else None
    return ratios


def whole_text(own: Trajectory, *, message: int, part: str, call: int, start: int) -> ShownText:
    """Return a further part of a text that the page showed only the beginning of.

    Raises:
        DataError: there is no such text.
    """
    messages = all_messages(own)
    if not 0 <= message < len(messages):
        raise DataError(f"message {message}: the attempt has {len(messages)}")
    found = messages[message]
    if part == "arguments" and 0 <= call < len(found.tool_calls):
        text = _arguments_text(found.tool_calls[call].arguments)
    elif part in ("content", "reasoning"):
        text = found.content if part == "content" else found.reasoning
    else:
        raise DataError(f"part {part!r} is not content, reasoning or the arguments of a call")
    return ShownText(text[start : start + 10 * MAX_TEXT], len(text))


def exact_prompt(own: Trajectory, texts: TokenTexts | None) -> ShownText:
    """Return what the model read before its first turn, token for token; an image is one mark."""
    actions = np.flatnonzero(own.action_mask)
    end = int(actions[0]) if len(actions) else own.num_tokens
    ids = own.token_ids[:end].tolist()
    if texts is None:
        return ShownText.of(" ".join(map(str, ids)), 10 * MAX_TEXT)
    pieces, start = [], 0
    for image in own.images:
        if image.position < end:
            pieces += [texts.joined(ids[start : image.position]), f"[image {image.columns}x{image.rows}]"]
            start = image.position + image.num_tokens
    return ShownText.of("".join([*pieces, texts.joined(ids[start:])]), 10 * MAX_TEXT)


def _arguments_text(arguments: Any) -> str:
    """Return the arguments of a call as JSON, on one line if they fit."""
    line = json.dumps(arguments, ensure_ascii=False)
    return line if len(line) <= MAX_LINE else json.dumps(arguments, indent=1, ensure_ascii=False)
