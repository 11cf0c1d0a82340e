"""The Arrow schema of trajectories: on the wire, in the replay buffer, and in Parquet files of a run.

A batch has N rows, one per trajectory. Token columns are lists whose values share one flat array, so encoding
is a concatenation and decoding a view. Nothing is pickled.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import DTypeLike, NDArray

from agentrl.data.parquet_files import read_table, reading_parquet, writing_parquet
from agentrl.errors import DataError
from agentrl.types import (
    ConversationRecord,
    Failure,
    ImageRef,
    Message,
    Outcome,
    PlacedImage,
    PluginId,
    RewardEvent,
    ToolCall,
    Trajectory,
)

FORMAT = b"7"
"""Version of this schema, in its metadata; raised when a column changes its meaning."""
WHAT = "a Parquet file of trajectories"
FORMER_FORMATS = frozenset({b"2", b"3", b"4", b"5", b"6"})
"""Older versions that can still be decoded. In version 2, `failure` was only its text. Before version 6,
conversations had no `opponent_versions`; before version 7, messages had no images.
"""

_SINCE = {
    "experts": 4,
    "conversations": 5,
    "segment_conversations": 5,
    "teacher_logprobs": 5,
    "images": 7,
}
"""Columns that files of former formats do not have, and the version that added them."""

TOOL_CALL = pa.struct(
    [
        pa.field("id", pa.large_string(), nullable=False),
        pa.field("name", pa.large_string(), nullable=False),
        pa.field("arguments", pa.large_string()),  # JSON text; null: the model's call could not be parsed
        pa.field("error", pa.large_string()),
    ]
)
# The bytes of an image are in a file beside the trajectories, named by its hash.
_IMAGE_FIELDS = [
    pa.field("sha256", pa.string(), nullable=False),
    pa.field("width", pa.int32(), nullable=False),
    pa.field("height", pa.int32(), nullable=False),
]
IMAGE = pa.struct(_IMAGE_FIELDS)
_PLACE_FIELDS = ("position", "rows", "columns", "cell_pixels")
PLACED_IMAGE = pa.struct(
    [*_IMAGE_FIELDS, *(pa.field(name, pa.int64(), nullable=False) for name in _PLACE_FIELDS)]
)
MESSAGE = pa.struct(
    [
        pa.field("role", pa.string(), nullable=False),
        pa.field("content", pa.large_string(), nullable=False),
        pa.field("tool_calls", pa.list_(TOOL_CALL), nullable=False),
        pa.field("tool_call_id", pa.large_string()),
        pa.field("name", pa.large_string()),
        pa.field("reasoning", pa.large_string(), nullable=False),
        pa.field("images", pa.list_(IMAGE), nullable=False),
    ]
)
CONVERSATION = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("messages", pa.large_list(MESSAGE), nullable=False),
        pa.field("opponent", pa.string()),
        pa.field("opponent_versions", pa.list_(pa.int32()), nullable=False),
    ]
)
REWARD = pa.struct(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
    ]
)
FAILURE = pa.struct(
    [
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("kind", pa.string()),  # of the plugin; null, as is its name, if no plugin caused the failure
        pa.field("plugin", pa.string()),
        pa.field("error", pa.string(), nullable=False),
        pa.field("place", pa.string(), nullable=False),
        pa.field("traceback", pa.large_string(), nullable=False),
    ]
)
# Large lists: a batch of long trajectories can have more than 2**31 values.
SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("member", pa.int32(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("data_source", pa.string(), nullable=False),
        pa.field("agent_name", pa.string(), nullable=False),
        pa.field("token_ids", pa.large_list(pa.int32()), nullable=False),
        pa.field("action_mask", pa.large_list(pa.bool_()), nullable=False),
        pa.field("behavior_logprobs", pa.large_list(pa.float32()), nullable=False),
        pa.field("versions", pa.large_list(pa.int32()), nullable=False),
        pa.field("turn_ids", pa.large_list(pa.int16()), nullable=False),
        pa.field("segment_starts", pa.list_(pa.int64()), nullable=False),
        pa.field("messages", pa.large_list(MESSAGE), nullable=False),
        pa.field("rewards", pa.list_(REWARD), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("failure", FAILURE),
        pa.field("metrics", pa.map_(pa.string(), pa.float64()), nullable=False),
        pa.field("extra_info", pa.large_string(), nullable=False),  # JSON text
        pa.field("is_greedy", pa.bool_(), nullable=False),
        pa.field("anchors", pa.large_list(pa.int64()), nullable=False),  # one per turn
        pa.field("experts", pa.large_list(pa.int16()), nullable=False),
        pa.field("conversations", pa.list_(CONVERSATION), nullable=False),  # empty: only one
        pa.field("segment_conversations", pa.list_(pa.int32()), nullable=False),
        pa.field("teacher_logprobs", pa.large_list(pa.float32()), nullable=False),
        pa.field("images", pa.list_(PLACED_IMAGE), nullable=False),
    ],
    metadata={b"agentrl.trajectories": FORMAT},
)

_ARRAY_DTYPES: Mapping[str, DTypeLike] = {
    "token_ids": np.int32,
    "action_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
    "turn_ids": np.int16,
    "anchors": np.int64,
    "experts": np.int16,
    "teacher_logprobs": np.float32,
}
"""Array columns: values per token, or per turn."""
_EMPTY: Mapping[str, Any] = {"messages": (), "extra_info": "{}", "conversations": ()}
_TEXTS = frozenset(_EMPTY)
_REPETITIVE = [
    *("task_id", "data_source", "agent_name", "outcome"),
    *(f"{name}.list.element" for name in ("versions", "turn_ids")),
]
"""Columns of Parquet files that get a dictionary. With one for tokens and log-probabilities, a file takes
five times as long to write, six times as long to read, and more space.
"""


# ------------------------------------------------------------------------------------- trajectories <-> Arrow


def encode(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """Return the N trajectories as one record batch of SCHEMA.

    Invalid Unicode (lone surrogates from a tool or from JSON escapes of the model) is replaced by `?`.
    Messages are only a view; the tokens stay exact.
    """
    columns: dict[str, pa.Array] = {name: _encode_arrays(trajectories, name) for name in _ARRAY_DTYPES}
    values: Mapping[str, Callable[[Trajectory], Any]] = {
        "group_id": lambda t: t.group_id,
        "member": lambda t: t.member,
        "task_id": lambda t: _unicode(t.task_id),
        "data_source": lambda t: _unicode(t.data_source),
        "agent_name": lambda t: t.agent_name,
        "segment_starts": lambda t: t.segment_starts,
        "messages": lambda t: [_encode_message(message) for message in t.messages],
        "rewards": lambda t: [
            {"name": event.name, "value": event.value, "position": event.position} for event in t.rewards
        ],
        "outcome": lambda t: t.outcome.value,
        "failure": lambda t: None if t.failure is None else encode_failure(t.failure),
        "metrics": lambda t: list(t.metrics.items()),
        "extra_info": lambda t: json.dumps(t.extra_info) if t.extra_info else "{}",
        "is_greedy": lambda t: t.is_greedy,
        "conversations": lambda t: [_encode_conversation(one) for one in t.conversations],
        "segment_conversations": lambda t: t.segment_conversations,
        "images": lambda t: [_encode_placed(image) for image in t.images],
    }
    for name, value_of in values.items():
        columns[name] = pa.array([value_of(t) for t in trajectories], type=SCHEMA.field(name).type)
    return pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def decode(
    batch: pa.RecordBatch, *, has_messages: bool = True, images: Path | None = None
) -> list[Trajectory]:
    """Return the trajectories of a batch that has at least the columns of SCHEMA.

    The arrays are read-only views of the batch's memory.

    has_messages: False: leave `messages`, `conversations` and `extra_info` empty; to decode them takes
        longest.
    images: folder of the images that they show; None: the images cannot be read.
    """
    columns = {name: _decode_arrays(batch, name) for name in _ARRAY_DTYPES}
    left_out = frozenset() if has_messages else _TEXTS
    plain = {
        name: [_EMPTY[name]] * batch.num_rows if name in left_out else _decode_plain(batch, name)
        for name in SCHEMA.names
        if name not in _ARRAY_DTYPES
    }
    return [
        Trajectory(
            group_id=plain["group_id"][row],
            member=plain["member"][row],
            task_id=plain["task_id"][row],
            data_source=plain["data_source"][row],
            agent_name=plain["agent_name"][row],
            segment_starts=tuple(plain["segment_starts"][row]),
            messages=tuple(_decode_message(message, images) for message in plain["messages"][row]),
            rewards=tuple(RewardEvent(**event) for event in plain["rewards"][row]),
            outcome=Outcome(plain["outcome"][row]),
            failure=_decode_failure(plain["failure"][row]),
            metrics=dict(plain["metrics"][row]),
            extra_info=json.loads(plain["extra_info"][row]),
            is_greedy=plain["is_greedy"][row],
            conversations=tuple(_decode_conversation(one, images) for one in plain["conversations"][row]),
            segment_conversations=tuple(plain["segment_conversations"][row]),
            images=tuple(_decode_placed(fields, images) for fields in plain["images"][row]),
            **{name: arrays[row] for name, arrays in columns.items()},  # type: ignore[arg-type]  # the schema has checked their dtypes
        )
        for row in range(batch.num_rows)
    ]


def _encode_arrays(trajectories: Sequence[Trajectory], name: str) -> pa.LargeListArray:
    arrays: list[NDArray[Any]] = [getattr(t, name) for t in trajectories]
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    # The empty first piece sets the dtype if there are no trajectories; `casting="no"` refuses a wrong one.
    flat = np.concatenate(
        [np.empty(0, _ARRAY_DTYPES[name]), *arrays], dtype=_ARRAY_DTYPES[name], casting="no"
    )
    return pa.LargeListArray.from_arrays(offsets, pa.array(flat), type=SCHEMA.field(name).type)


def _decode_arrays(batch: pa.RecordBatch, name: str) -> list[NDArray[Any]]:
    if name in _SINCE and name not in batch.schema.names:
        return [np.empty(0, _ARRAY_DTYPES[name]) for _ in range(batch.num_rows)]
    column = batch.column(name)
    offsets = column.offsets.to_numpy()
    # `column.values` ignores that the batch may be a slice; the offsets do not. Booleans (bits in Arrow) are
    # copied, all other types are views.
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    flat = column.values.slice(first, last - first).to_numpy(zero_copy_only=False)
    flat.flags.writeable = False
    return [flat[start - first : end - first] for start, end in itertools.pairwise(offsets)]


def _decode_plain(batch: pa.RecordBatch, name: str) -> list[Any]:
    if name in _SINCE and name not in batch.schema.names:
        return [()] * batch.num_rows
    return batch.column(name).to_pylist()  # type: ignore[no-any-return]


def _encode_conversation(one: ConversationRecord) -> dict[str, Any]:
    messages = [_encode_message(message) for message in one.messages]
    return {
        "name": one.name,
        "messages": messages,
        "opponent": one.opponent,
        "opponent_versions": one.opponent_versions,
    }


def _decode_conversation(fields: dict[str, Any], folder: Path | None) -> ConversationRecord:
    messages = tuple(_decode_message(message, folder) for message in fields["messages"])
    versions = tuple(fields["opponent_versions"]) if "opponent_versions" in fields else ()
    return ConversationRecord(fields["name"], messages, fields["opponent"], versions)


def _encode_message(message: Message) -> dict[str, Any]:
    calls = [
        {
            "id": _unicode(call.id),
            "name": _unicode(call.name),
            "arguments": None if call.arguments is None else json.dumps(call.arguments),
            "error": _unicode(call.error),
        }
        for call in message.tool_calls
    ]
    content, call_id, name = _unicode(message.content), _unicode(message.tool_call_id), _unicode(message.name)
    return {
        "role": message.role,
        "content": content,
        "tool_calls": calls,
        "tool_call_id": call_id,
        "name": name,
        "reasoning": _unicode(message.reasoning),
        "images": [_encode_image(image) for image in message.images],
    }


def _encode_image(image: ImageRef) -> dict[str, Any]:
    return {"sha256": image.sha256, "width": image.width, "height": image.height}


def _decode_image(fields: dict[str, Any], folder: Path | None) -> ImageRef:
    sha256 = fields["sha256"]
    path = "" if folder is None else str(folder / sha256)
    return ImageRef(sha256, fields["width"], fields["height"], path)


def _encode_placed(placed: PlacedImage) -> dict[str, Any]:
    return _encode_image(placed.image) | {name: getattr(placed, name) for name in _PLACE_FIELDS}


def _decode_placed(fields: dict[str, Any], folder: Path | None) -> PlacedImage:
    return PlacedImage(_decode_image(fields, folder), *(fields[name] for name in _PLACE_FIELDS))


def _decode_message(fields: dict[str, Any], folder: Path | None) -> Message:
    calls = tuple(
        ToolCall(
            id=call["id"],
            name=call["name"],
            arguments=None if call["arguments"] is None else json.loads(call["arguments"]),
            error=call["error"],
        )
        for call in fields["tool_calls"]
    )
    return Message(
        fields["role"],
        fields["content"],
        calls,
        fields["tool_call_id"],
        fields["name"],
        fields["reasoning"],
        tuple(_decode_image(image, folder) for image in fields.get("images", ())),
    )


def encode_failure(failure: Failure) -> dict[str, Any]:
    """Return the fields of the struct FAILURE."""
    kind, plugin = (
        (None, None) if failure.plugin is None else (failure.plugin.kind, _unicode(failure.plugin.name))
    )
    texts = {name: _unicode(getattr(failure, name)) for name in ("text", "error", "place", "traceback")}
    return {"kind": kind, "plugin": plugin, **texts}


def _decode_failure(fields: dict[str, Any] | str | None) -> Failure | None:
    if fields is None or isinstance(fields, str):
        return None if fields is None else Failure(fields)
    plugin = None if fields["kind"] is None else PluginId(fields["kind"], fields["plugin"])
    return Failure(fields["text"], plugin, fields["error"], fields["place"], fields["traceback"])


def _unicode(text: str | None) -> str | None:
    if text is None or text.isascii():
        return text
    return text.encode("utf-8", errors="replace").decode("utf-8")


# ------------------------------------------------------------------------------------- Arrow <-> bytes, files


def to_ipc(batch: pa.RecordBatch) -> bytes:
    """Return the batch as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def from_ipc(data: bytes) -> pa.RecordBatch:
    """Return the record batch of an Arrow IPC stream; its columns are views of `data`.

    Raises:
        DataError: the stream does not contain trajectories in a known format.
    """
    try:
        table = pa.ipc.open_stream(data).read_all()
    except pa.ArrowInvalid as error:
        raise DataError(f"not an Arrow stream of trajectories: {error}") from error
    check_schema(table.schema, "stream")
    return _one_batch(table)


def write_parquet(
    path: str | Path, batch: pa.RecordBatch, **columns: int | float | str | Sequence[Any]
) -> None:
    """Write trajectories to `path`, atomically.

    `columns` are put first: one value for all rows (`step=3`), or a sequence of N values.
    """
    write_parquet_batches(path, [batch], **columns)


def write_parquet_batches(
    path: str | Path, batches: Iterable[pa.RecordBatch], **columns: int | float | str | Sequence[Any]
) -> None:
    """Do the same with several batches, of which one after the other is in memory; there is at least one.

    A sequence of values as a column needs a single batch.
    """
    with ExitStack() as stack:
        writer = None
        for batch in batches:
            table = pa.Table.from_batches([batch])
            for position, (name, value) in enumerate(columns.items()):
                values = [value] * batch.num_rows if isinstance(value, (int, float, str)) else list(value)
                table = table.add_column(position, name, pa.array(values))
            if writer is None:
                options = {"compression": "zstd", "use_dictionary": _REPETITIVE}
                writer = stack.enter_context(writing_parquet(Path(path), table.schema, **options))
            writer.write_table(table)


def read_parquet(path: str | Path) -> pa.RecordBatch:
    """Read a file of `write_parquet`, additional columns included; `decode` accepts the result.

    Raises:
        DataError: the file does not exist, is damaged, or does not contain trajectories in a known format.
    """
    try:
        table = read_table(path, WHAT)
    except FileNotFoundError as error:
        raise DataError(f"trajectory file {str(path)!r} does not exist") from error
    check_schema(table.schema, str(path))
    return _one_batch(table)


def read_trajectories(
    path: str | Path, *, images: Path | None = None
) -> tuple[list[Trajectory], pa.RecordBatch]:
    """Return the trajectories in a file of `write_parquet`, and the batch that they are in.

    images: see `decode`.

    Raises:
        DataError: as `read_parquet`.
    """
    batch = read_parquet(path)
    with reading_parquet(path, WHAT):
        return decode(batch, images=images), batch


def check_schema(schema: pa.Schema, where: str) -> None:
    """Check that `schema` has a known format and every column of SCHEMA.

    Raises:
        DataError: it does not.
    """
    found = (schema.metadata or {}).get(b"agentrl.trajectories")
    if found != FORMAT and found not in FORMER_FORMATS:
        raise DataError(
            f"{where}: trajectories of format {found.decode() if found else 'unknown'}, expected "
            f"{FORMAT.decode()}"
        )
    known = [name for name in SCHEMA.names if int(found) >= _SINCE.get(name, 0)]
    found_names = set(schema.names)
    missing = [name for name in known if name not in found_names]
    if missing:
        raise DataError(f"{where}: trajectories without the columns {', '.join(missing)}")


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.to_batches()
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
