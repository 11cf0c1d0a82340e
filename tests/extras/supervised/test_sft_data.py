"""Rows of SFT and of reward models as samples: what is learned, what is cut, and what a malformed row is
told.
"""

import datetime
import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.adapters.catalog import open_plugins
from agentrl.chat.chat import Chat
from agentrl.chat.tiny import write_tiny_tokenizer
from agentrl.config.agent import AgentConfig
from agentrl.errors import AgentRLError, DataError, PluginError
from agentrl.extras.supervised.config import (
    RMConfig,
    RMDataConfig,
    SFTConfig,
    SFTDataConfig,
    SFTTrainerConfig,
)
from agentrl.extras.supervised.data import read_conversations, read_pairs
from agentrl.extras.supervised.loop import Order
from agentrl.learner.batch import Sample

SCHEMA = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}
THINKING = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.last %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
{{- message.content + '<|im_end|>' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # noqa: E501


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def chat(folder):
    return Chat.load(str(folder))


PLUGINS = open_plugins(AgentConfig())


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def jsonl(folder, *rows):
    path = folder / f"{abs(hash(json.dumps(rows)))}.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def conversations(folder, chat, *rows, **config):
    return read_conversations([jsonl(folder, *rows)], SFTDataConfig(**config), chat, PLUGINS)


def read_in(folder, chat, *rows, **config):
    return read_pairs([jsonl(folder, *rows)], RMDataConfig(**config), chat, PLUGINS)


def learned(chat, sample):
    """The runs of learned tokens as texts."""
    runs = itertools.groupby(range(sample.num_tokens), key=lambda t: bool(sample.loss_mask[t]))
    return [chat.decode(sample.token_ids[list(run)].tolist()) for is_learned, run in runs if is_learned]


# ---------------------------------------------------------------------------------------------- conversations


@pytest.mark.parametrize("as_text", [False, True])
def test_a_row_is_rendered_with_its_own_arguments_of_the_template(tmp_path, as_text):
    write_tiny_tokenizer(tmp_path)
    source = THINKING.replace("message.role + '\\n'", "message.role + (tone or '') + '\\n'")
    assert source != THINKING
    (tmp_path / "chat_template.jinja").write_text(source)
    chat = Chat.load(str(tmp_path))
    own = '{"tone": "/b"}' if as_text else {"tone": "/b"}
    rows = [{"messages": [user("?"), said("!")]}, {"messages": [user("?"), said("!")], "how": own}]
    plain, toned = conversations(tmp_path, chat, *rows, chat_template_kwargs_key="how").samples
    texts = [chat.decode(sample.token_ids.tolist()) for sample in (plain, toned)]
    assert texts[1] == texts[0].replace("user", "user/b") != texts[0]
    unread = {"messages": [user("?"), said("!")], "how": {"tune": "/b"}}
    with pytest.raises(AgentRLError, match=r"row 0.*: how: .*reads no variable 'tune'; did you mean 'tone'"):
        conversations(tmp_path, chat, unread, chat_template_kwargs_key="how")


def test_every_assistant_turn_is_learned_and_nothing_else(tmp_path, chat):
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'},
    }
    rows = {
        "messages": [
            user("1+1?"),
            said("", tool_calls=[call]),
            {"role": "tool", "content": "2", "tool_call_id": "c"},
            said("It is 2."),
        ],
        "tools": ["calculator"],
    }
    examples = conversations(tmp_path, chat, rows)
    first, last = learned(chat, examples.samples[0])
    assert "<tool_call>" in first
    assert "1+1" in first
    assert first.rstrip().endswith("<|im_end|>")
    assert last == "It is 2.<|im_end|>"


def test_of_a_prompt_and_a_response_only_the_response_is_learned(tmp_path, chat):
    rows = [
        {"question": "Say a.", "answer": "a"},
        {"question": [user("Say b."), said("c"), user("No, b.")], "answer": "b"},
        {"question": json.dumps([user("Say b."), said("c"), user("No, b.")]), "answer": "b"},
        {"question": "[1, 2]?", "answer": "c"},
    ]
    examples = conversations(tmp_path, chat, *rows, prompt_key="question", response_key="answer")
    assert [learned(chat, sample) for sample in examples.samples] == [
        [f"{answer}<|im_end|>"] for answer in "abbc"
    ]
    as_messages = conversations(tmp_path, chat, {"messages": [user("Say a."), said("a")]})
    assert as_messages.samples[0].token_ids.tolist() == examples.samples[0].token_ids.tolist()


def test_a_column_within_a_struct(tmp_path, chat):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"extra_info": [{"question": "Say a.", "answer": "a"}]}), path)
    config = SFTDataConfig(prompt_key="extra_info.question", response_key="extra_info.answer")
    examples = read_conversations([str(path)], config, chat, PLUGINS)
    assert learned(chat, examples.samples[0]) == ["a<|im_end|>"]


@pytest.mark.parametrize(
    "key", ["loss_mask", "step_loss_mask", "loss", "loss_scale", "weight", "train", "training", "trainable"]
)
@pytest.mark.parametrize(("no", "yes"), [(0, 1), (False, True), (0.0, None)])
def test_messages_that_a_row_marks_are_context(tmp_path, chat, key, no, yes):
    messages = [user("q"), said("WRONG", **{key: no}), user("again"), said("right", **{key: yes})]
    rows = [{"messages": messages}, {"messages": json.dumps(messages)}]
    for sample in conversations(tmp_path, chat, *rows).samples:
        assert learned(chat, sample) == ["right<|im_end|>"]
        assert "WRONG" in chat.decode(sample.token_ids.tolist())
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows[:1]), path)
    [sample] = read_conversations([str(path)], SFTDataConfig(), chat, PLUGINS).samples
    assert learned(chat, sample) == ["right<|im_end|>"]


def test_rows_without_a_message_to_learn_are_counted(tmp_path, chat):
    marked = {"messages": [user("q"), said("WRONG", weight=0)]}
    examples = conversations(tmp_path, chat, marked, {"messages": [user("q"), said("a")]})
    assert examples.summary("conversation") == "1 conversation, 1 left out without a message to learn"
    with pytest.raises(DataError, match="no conversation to train on: 1 have no message to learn"):
        conversations(tmp_path, chat, marked)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user("q"), said("a", weight=0.5)], "messages[1].weight': must be 0 or 1 (false or true), is 0.5"),
        ([user("q"), said("a", train="no")], "messages[1].train': must be 0 or 1 (false or true), is 'no'"),
        (
            [user("q"), said("a", loss=1, weight=0)],
            "messages[1]': is marked to be learned, and not to be: loss 1",
        ),
        (
            [{**user("q"), "train": True}, said("a")],
            "messages[0]': is marked to be learned, but has the role user",
        ),
        ([user("q"), said("a", train_detail=[{"train": False}])], "messages[1].train_detail': is not supp"),
        ([user("q"), said("a", loss_weight=0)], "messages[1].loss_weight': is not supported; mark whole me"),
        ([user("q"), said("a", train_on_turn=False)], "messages[1].train_on_turn': is not supported"),
        ([user("q"), said("a", function_call={"name": "f"})], "messages[1].function_call': is not read"),
    ],
)
def test_marks_that_cannot_be_honoured_are_refused(tmp_path, chat, messages, words):
    for row in ({"messages": messages}, {"messages": messages, "tools": []}):
        with pytest.raises(DataError) as error:
            conversations(tmp_path, chat, row)
        assert "row 0 (line 1): field '" in str(error.value)
        assert words in str(error.value)


def test_marks_where_they_say_nothing_are_refused(tmp_path, chat):
    prompt = {"p": [user("q"), said("a", weight=1), user("r")], "r": "b"}
    with pytest.raises(DataError, match="field 'p': marks a message to learn, but only 'r' is learned"):
        conversations(tmp_path, chat, prompt, prompt_key="p", response_key="r")
    pair = {"prompt": "q", "chosen": [said("a", loss_mask=0)], "rejected": "b"}
    with pytest.raises(DataError, match="field 'chosen': marks a message that is not learned"):
        read_in(tmp_path, chat, pair)
    assert len(read_in(tmp_path, chat, {**pair, "chosen": [said("a", loss_mask=1)]}).samples) == 1


def test_null_arguments_in_json_text_are_trained_and_parquets_are_not(tmp_path, chat):
    def row(arguments):
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
        return {"messages": [user("?"), said("", tool_calls=[call])], "tools": [SCHEMA["function"]]}

    text = conversations(tmp_path, chat, row('{"city": "Bern", "unit": null}')).samples[0]
    assert '{"city": "Bern", "unit": null}' in learned(chat, text)[0]
    path = tmp_path / "rows.parquet"
    rows = [row({"city": "Bern", "unit": "C"}), row({"city": "Oslo", "day": datetime.date(2026, 1, 2)})]
    for one in rows:
        one["tools"] = json.dumps(one["tools"])
    pq.write_table(pa.Table.from_pylist(rows), path)
    filled = read_conversations([str(path)], SFTDataConfig(), chat, PLUGINS).samples
    assert '{"city": "Bern", "unit": "C"}' in learned(chat, filled[0])[0]
    assert '{"city": "Oslo", "day": "2026-01-02"}' in learned(chat, filled[1])[0]


def test_schemas_are_shown_as_they_are_also_as_json(tmp_path, chat):
    messages = [user("?"), said("!")]
    plain, as_json, without, bare, listed = conversations(
        tmp_path,
        chat,
        {"messages": messages, "tools": [SCHEMA]},
        {"messages": messages, "tools": json.dumps([SCHEMA])},
        {"messages": messages},
        {"messages": messages, "tools": [SCHEMA["function"]]},
        {"messages": messages, "tools": [json.dumps(SCHEMA)]},
    ).samples
    assert plain.token_ids.tolist() == bare.token_ids.tolist() == listed.token_ids.tolist()
    assert plain.token_ids.tolist() == as_json.token_ids.tolist()
    assert "look(): Look." in chat.decode(plain.token_ids.tolist())
    assert "look(): Look." not in chat.decode(without.token_ids.tolist())


def test_a_template_that_edits_the_history_gives_rows_of_which_each_learns_its_turns(tmp_path, folder):
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING)
    chat = Chat.load(str(folder), template_file=str(template))
    row = {
        "messages": [user("a"), said("1", reasoning_content="x"), user("b"), said("2", reasoning_content="y")]
    }
    [sample] = conversations(tmp_path, chat, row).samples
    assert len(sample.segment_starts) == 2
    texts = learned(chat, sample)
    assert [text.replace("<think>", "").replace("</think>", "|") for text in texts] == [
        "x|1<|im_end|>",
        "y|2<|im_end|>",
    ]
    assert not sample.loss_mask[list(sample.segment_starts)].any()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(12, 60))
def test_long_conversations_are_left_out_or_cut_and_counted(tmp_path_factory, chat, lengths, max_tokens):
    tmp_path = tmp_path_factory.mktemp("rows")
    rows = [{"messages": [user("?"), said("z" * length)]} for length in lengths]
    whole = [sample.token_ids for sample in conversations(tmp_path, chat, *rows).samples]
    fitting = [ids.tolist() for ids in whole if len(ids) <= max_tokens]
    if fitting:
        kept = conversations(tmp_path, chat, *rows, max_tokens=max_tokens)
        assert [sample.token_ids.tolist() for sample in kept.samples] == fitting
        assert (kept.num_dropped, kept.num_truncated) == (len(whole) - len(fitting), 0)
    else:
        cause = f"all {len(whole)} exceed data.max_tokens={max_tokens}"
        with pytest.raises(DataError, match=rf"{cause}; raise it$"):
            conversations(tmp_path, chat, *rows, max_tokens=max_tokens)
    cut = conversations(tmp_path, chat, *rows, max_tokens=max_tokens, overlong="truncate")
    assert [sample.token_ids.tolist() for sample in cut.samples] == [
        ids[:max_tokens].tolist() for ids in whole
    ]
    assert [sample.index for sample in cut.samples] == list(range(len(whole)))
    assert (cut.num_dropped, cut.num_truncated) == (0, len(whole) - len(fitting))


def test_what_is_cut_down_to_its_prompt_is_left_out(tmp_path, chat):
    rows = [{"messages": [user("z" * 50), said("a")]}, {"messages": [user("?"), said("a")]}]
    examples = conversations(tmp_path, chat, *rows, max_tokens=30, overlong="truncate")
    assert (len(examples.samples), examples.num_dropped) == (1, 1)
    assert examples.summary("conversation") == "1 conversation, 1 left out as too long"


@pytest.mark.parametrize(
    ("row", "config", "kind", "words"),
    [
        (
            {"messages": "hello"},
            {},
            DataError,
            "row 0 (line 1): field 'messages': must be a list of {role, content}, is 'hello'",
        ),
        (
            {"text": []},
            {},
            DataError,
            "field 'messages': is missing; the row has text; name its column in data.messages_key",
        ),
        (
            {"messages": [{"role": "bot", "content": ""}]},
            {},
            DataError,
            "field 'messages[0].role': must be one of system, user",
        ),
        (
            {"messages": [user("?")]},
            {},
            DataError,
            "row 0 (line 1): the conversation has no assistant message",
        ),
        (
            {"messages": [said("!")], "tools": ["hammer"]},
            {},
            PluginError,
            "row 0 (line 1): field 'tools': unknown tool 'hammer'",
        ),
        (
            {"messages": [said("!")], "tools": [3]},
            {},
            DataError,
            "field 'tools': must contain names of tools, or schemas",
        ),
        (
            {"messages": [said("!")], "tools": "[hammer"},
            {},
            DataError,
            "field 'tools': is not valid JSON",
        ),
        (
            {"p": "?", "r": 3},
            {"prompt_key": "p", "response_key": "r"},
            DataError,
            "field 'r': must be text, is 3",
        ),
        (
            {"r": "!"},
            {"prompt_key": "p", "response_key": "r"},
            DataError,
            "field 'p': is missing; the row has r; name its column in data.prompt_key",
        ),
    ],
)
def test_a_malformed_row_is_named(tmp_path, chat, row, config, kind, words):
    with pytest.raises(AgentRLError) as caught:
        conversations(tmp_path, chat, row, **config)
    assert isinstance(caught.value, kind)
    assert words in str(caught.value)
    assert str(caught.value).count("row 0") == 1


def test_no_rows_are_no_data(tmp_path, chat):
    with pytest.raises(DataError, match=r"no conversation to train on: .* hold no rows"):
        conversations(tmp_path, chat)


def test_keys_that_belong_together():
    with pytest.raises(ValidationError, match=r"data.prompt_key requires data.response_key"):
        SFTDataConfig(prompt_key="question")
    for config in (SFTConfig, RMConfig):
        with pytest.raises(ValidationError, match=r"trainer.export=best needs a validation loss"):
            config.model_validate({"trainer": {"export": "best"}})
        assert (
            config.model_validate(
                {"trainer": {"export": "best"}, "data": {"val_files": ["v.jsonl"]}}
            ).trainer.export
            == "best"
        )


# ------------------------------------------------------------------------------------------------------ pairs


def texts_of(chat, sample):
    first, second = sample.segment_starts[1], sample.num_tokens
    return [chat.decode(sample.token_ids[start:end].tolist()) for start, end in ((0, first), (first, second))]


def test_texts_messages_and_whole_conversations_are_the_same_pair(tmp_path, chat):
    rows = [
        {"prompt": "Add.", "chosen": "2", "rejected": "3"},
        {"prompt": [user("Add.")], "chosen": [said("2")], "rejected": [said("3")]},
        {"prompt": "Add.", "chosen": [user("Add."), said("2")], "rejected": [user("Add."), said("3")]},
        {"chosen": [user("Add."), said("2")], "rejected": [user("Add."), said("3")]},
        {"chosen": json.dumps([user("Add."), said("2")]), "rejected": [user("Add."), said("3")]},
    ]
    samples = read_in(tmp_path, chat, *rows).samples
    chosen, rejected = texts_of(chat, samples[0])
    assert chosen.endswith("2<|im_end|>")
    assert chosen[: -len("2<|im_end|>")] == rejected[: -len("3<|im_end|>")]
    for sample in samples[1:]:
        assert sample.token_ids.tolist() == samples[0].token_ids.tolist()


def test_a_pair_is_one_sequence_that_counts_once():
    sample = Sample.pair(4, np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32))
    assert sample.segment_lengths.tolist() == [3, 2]
    assert sample.loss_mask.tolist() == [False, False, False, False, True]
    assert sample.index == 4


def test_of_an_edited_history_the_last_row_is_scored(tmp_path, folder):
    template = tmp_path / "thinking.jinja"
    template.write_text(THINKING)
    chat = Chat.load(str(folder), template_file=str(template))
    prompt = [user("a"), said("1", reasoning_content="x"), user("b")]
    [sample] = read_in(tmp_path, chat, {"prompt": prompt, "chosen": "2", "rejected": "3"}).samples
    assert len(sample.segment_starts) == 2
    assert all("x" not in text and "1" in text for text in texts_of(chat, sample))


def test_a_long_pair_is_left_out_or_loses_its_beginning(tmp_path, chat):
    rows = [
        {"prompt": "?" * 40, "chosen": "good", "rejected": "b"},
        {"prompt": "?", "chosen": "good", "rejected": "b"},
    ]
    assert read_in(tmp_path, chat, *rows, max_tokens=25).num_dropped == 1
    cut = read_in(tmp_path, chat, *rows, max_tokens=25, overlong="truncate")
    assert (cut.num_dropped, cut.num_truncated) == (0, 1)
    assert cut.samples[0].segment_lengths.tolist() == [25, 25]
    chosen, rejected = texts_of(chat, cut.samples[0])
    assert chosen.endswith("good<|im_end|>")
    assert rejected.endswith("b<|im_end|>")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": "a", "rejected": "b"}, "field 'chosen': is text without a prompt"),
        ({"prompt": "?", "chosen": "a"}, "field 'rejected': is missing; the row has prompt, chosen; "),
        (
            {"prompt": "?", "chosen": [said("a"), user("b")], "rejected": "b"},
            "field 'chosen': must end with a message of the assistant",
        ),
    ],
)
def test_a_malformed_pair_is_named(tmp_path, chat, row, words):
    with pytest.raises(DataError) as caught:
        read_in(tmp_path, chat, row)
    assert words in str(caught.value)


# ------------------------------------------------------------------------------------------------------ order


@given(
    num_samples=st.integers(1, 20),
    batch_size=st.integers(1, 25),
    epochs=st.integers(1, 4),
    made=st.integers(0, 30),
)
def test_epochs_see_every_row_as_often_and_a_resume_sees_the_rest(num_samples, batch_size, epochs, made):
    order = Order.of(num_samples, SFTTrainerConfig(batch_size=batch_size, total_epochs=epochs))
    batches = [batch.tolist() for batch in order.batches()]
    assert len(batches) == order.num_updates
    assert all(len(batch) == batch_size for batch in batches[:-1])
    flat = list(itertools.chain(*batches))
    for epoch in range(epochs):
        assert sorted(flat[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))
    assert len(flat) == epochs * num_samples
    assert [batch.tolist() for batch in order.batches(made_updates=made)] == batches[made:]


def test_steps_are_full_batches_of_an_order_by_the_seed():
    def of(**changes):
        order = Order.of(5, SFTTrainerConfig(steps=4, batch_size=3, **changes))
        return [batch.tolist() for batch in order.batches()]

    assert [len(batch) for batch in of()] == [3, 3, 3, 3]
    assert of() == of()
    assert of(seed=1) != of()
