"""Trajectories through Arrow: exact, slice-safe, and never through pickle."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.data.trajectories import (
    SCHEMA,
    decode,
    encode,
    from_ipc,
    read_parquet,
    to_ipc,
    write_parquet,
)
from agentrl.errors import DataError
from agentrl.types import (
    NO_VERSION,
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
from parts.trajectories import make_trajectory

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=3)
CALLS = st.builds(ToolCall, id=TEXT, name=TEXT, arguments=st.none() | OBJECTS, error=st.none() | TEXT)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=TEXT,
    tool_calls=st.lists(CALLS, max_size=2).map(tuple),
    tool_call_id=st.none() | TEXT,
    name=st.none() | TEXT,
    reasoning=TEXT,
)
FINITE = st.floats(allow_nan=False)
PLUGINS = st.builds(PluginId, st.sampled_from(["agent", "tool", "interaction", "reward"]), TEXT)
FAILURES = st.builds(Failure, TEXT, st.none() | PLUGINS, TEXT, TEXT, TEXT)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    mask = np.array(draw(st.lists(st.booleans(), max_size=9)), dtype=np.bool_)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = len(mask)
    return Trajectory(
        group_id=draw(st.integers(0, 2**62)),
        member=draw(st.integers(0, 1000)),
        task_id=draw(TEXT),
        data_source=draw(TEXT),
        agent_name=draw(TEXT),
        token_ids=rng.integers(0, 2**31 - 1, size, dtype=np.int32),
        action_mask=mask,
        behavior_logprobs=np.where(mask, rng.normal(size=size), 0.0).astype(np.float32),
        versions=np.where(mask, rng.integers(0, 9, size), NO_VERSION).astype(np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int16),
        messages=tuple(draw(st.lists(MESSAGES, max_size=3))),
        rewards=tuple(
            draw(st.lists(st.builds(RewardEvent, TEXT, FINITE, st.integers(0, 2**40)), max_size=2))
        ),
        outcome=draw(st.sampled_from(Outcome)),
        failure=draw(st.none() | FAILURES),
        metrics=draw(st.dictionaries(TEXT, FINITE, max_size=3)),
        extra_info=draw(OBJECTS),
        segment_starts=(0, *sorted(draw(st.sets(st.integers(1, size - 1))))) if size > 1 else (0,),
        is_greedy=draw(st.booleans()),
        anchors=rng.integers(-(2**63), 2**63 - 1, int(rng.integers(4)), dtype=np.int64),
    )


def assert_same(left: list[Trajectory], right: list[Trajectory]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for field in dataclasses.fields(Trajectory):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)
            else:
                assert x == y, field.name


def simple(text: str = "x", *, versions: list[int] | None = None, member: int = 0) -> Trajectory:
    stamps = np.array([NO_VERSION, 3] if versions is None else versions)
    turns, messages = np.where(stamps != NO_VERSION, 0, -1), (Message("assistant", text),)
    return make_trajectory(turns, group_id=1, member=member, versions=stamps, messages=messages)


@settings(max_examples=80, deadline=None)
@given(st.lists(trajectories(), max_size=4))
def test_wire_is_exact(items):
    batch = encode(items)
    assert batch.schema.equals(SCHEMA, check_metadata=True)
    assert_same(decode(from_ipc(to_ipc(batch))), items)


@settings(max_examples=40, deadline=None)
@given(st.lists(trajectories(), min_size=1, max_size=5), st.data())
def test_any_slice_and_any_regrouping_of_rows_is_exact(items, data):
    start = data.draw(st.integers(0, len(items) - 1))
    stop = data.draw(st.integers(start, len(items)))
    part = encode(items).slice(start, stop - start)
    assert_same(decode(part), items[start:stop])
    assert_same(decode(from_ipc(to_ipc(part))), items[start:stop])
    rows = [encode(items).slice(i, 1) for i in reversed(range(len(items)))]
    assert_same(decode(pa.concat_batches(rows)), items[::-1])


def test_a_slice_sent_alone_carries_only_its_rows():
    long = simple("y" * 100_000, versions=[1] * 10_000)
    batch = encode([long, simple(), long])
    assert len(to_ipc(batch.slice(1, 1))) < 20_000 < len(to_ipc(batch))


def test_token_arrays_are_views_that_cannot_be_written():
    [trajectory] = decode(from_ipc(to_ipc(encode([simple()]))))
    assert not trajectory.token_ids.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        trajectory.action_mask[0] = True


def test_lone_surrogates_and_non_finite_numbers_do_not_lose_the_trajectory():
    call = ToolCall(id="c", name="\ud800", arguments={"x": float("inf"), "y": 10**30, "z": "\udc00"})
    item = simple("bad \udfff text").replace(
        messages=(Message("assistant", "bad \udfff text", (call,)),), metrics={"n": 2.0}
    )
    [back] = decode(from_ipc(to_ipc(encode([item]))))
    assert back.messages[0].content == "bad ? text"
    assert back.messages[0].tool_calls == (dataclasses.replace(call, name="?"),)


def test_a_wrong_dtype_is_refused_instead_of_cast():
    wrong = simple().replace(token_ids=np.array([1, 2], dtype=np.int64))
    with pytest.raises(TypeError, match="int64"):
        encode([wrong])


def test_parquet_keeps_trajectories_and_added_columns(tmp_path: Path):
    path = tmp_path / "trajectories" / "step_3.parquet"
    items = [simple(member=0), simple(member=1, versions=[NO_VERSION])]
    write_parquet(path, encode(items), step=3, advantage=[0.5, -0.5])
    batch = read_parquet(path)
    assert_same(decode(batch), items)
    assert batch.column("step").to_pylist() == [3, 3]
    assert batch.column("advantage").to_pylist() == [0.5, -0.5]
    assert [p.name for p in path.parent.iterdir()] == ["step_3.parquet"]


def test_foreign_bytes_and_files_are_named(tmp_path: Path):
    with pytest.raises(DataError, match="not an Arrow stream"):
        from_ipc(b"nothing of the kind")
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"x": [1]}), other)
    with pytest.raises(DataError, match=r"other\.parquet: trajectories of format unknown, expected 8"):
        read_parquet(other)
    with pytest.raises(DataError, match="does not exist"):
        read_parquet(tmp_path / "none.parquet")


@pytest.mark.parametrize(
    ("former", "lacks"),
    [
        ("5", ("images",)),
        ("4", ("images", "conversations", "segment_conversations")),
        ("3", ("images", "experts", "conversations", "segment_conversations")),
    ],
)
def test_files_of_former_formats_are_read_and_lack_what_came_later(tmp_path: Path, former, lacks):
    batch = encode([simple()])
    names = [name for name in batch.schema.names if name not in lacks]
    table = pa.Table.from_batches([batch.select(names)])
    table = table.replace_schema_metadata({b"agentrl.trajectories": former.encode()})
    pq.write_table(table, tmp_path / "old.parquet")
    assert_same(decode(read_parquet(tmp_path / "old.parquet")), [simple()])
    pq.write_table(
        table.drop_columns(["turn_ids"]).replace_schema_metadata(table.schema.metadata),
        tmp_path / "bad.parquet",
    )
    with pytest.raises(DataError, match="without the columns turn_ids"):
        read_parquet(tmp_path / "bad.parquet")


def test_conversations_of_format_5_have_no_versions_of_opponents(tmp_path: Path):
    others = (
        ConversationRecord("main", (Message("user", "begin"),)),
        ConversationRecord("other", (Message("user", "go"),), "past", (0, 7)),
    )
    trajectory = simple().replace(conversations=others, segment_conversations=(0,))
    batch = encode([trajectory])
    assert_same(decode(batch), [trajectory])
    column = batch.column("conversations")
    former = [
        {name: value for name, value in one.items() if name != "opponent_versions"}
        for one in column.to_pylist()[0]
    ]
    kind = pa.list_(
        pa.struct([field for field in column.type.value_type if field.name != "opponent_versions"])
    )
    place = batch.schema.get_field_index("conversations")
    table = pa.Table.from_batches([batch]).set_column(
        place, pa.field("conversations", kind, nullable=False), pa.array([former], kind)
    )
    pq.write_table(
        table.replace_schema_metadata({b"agentrl.trajectories": b"5"}), tmp_path / "former.parquet"
    )
    (found,) = decode(read_parquet(tmp_path / "former.parquet"))
    assert found.conversations[1] == dataclasses.replace(others[1], opponent_versions=())


def test_a_new_file_without_its_columns_is_refused(tmp_path: Path):
    table = pa.Table.from_batches([encode([simple()])]).drop_columns(["conversations"])
    pq.write_table(table, tmp_path / "new.parquet")
    with pytest.raises(DataError, match="without the columns conversations"):
        read_parquet(tmp_path / "new.parquet")


def test_images_are_stored_by_reference(tmp_path: Path):
    image = ImageRef("ab12", 30, 20, "/elsewhere/ab12")
    shown = simple().replace(
        messages=(Message("user", "<image>?", images=(image,)),),
        images=(PlacedImage(image, 1, 2, 3, 28),),
    )
    [found] = decode(from_ipc(to_ipc(encode([shown]))), images=tmp_path)
    assert found.images == shown.images
    assert found.messages == shown.messages
    assert found.images[0].image.path == found.messages[0].images[0].path == str(tmp_path / "ab12")
