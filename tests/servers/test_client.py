"""Reading SGLang's replies: what fits becomes arrays, what contradicts itself is refused."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import InfrastructureError, RequestRefused, ServerError
from agentrl.servers.launch import as_options
from agentrl.servers.process_group import (
    broadcast,
    flatten,
    join_weights_group,
    leave_weights_group,
    unflatten,
)
from agentrl.servers.protocol import (
    error_message,
    parse_generation,
    parse_load,
    parse_model_info,
    parse_versions,
)
from parts.learner import reserved_port

REPLY = {
    "text": "",
    "output_ids": [4, 5, 6],
    "meta_info": {
        "id": "r",
        "finish_reason": {"type": "length", "length": 3},
        "weight_version": "8",
        "weight_versions": [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}],
        "output_token_logprobs": [[-0.5, 4, None], [-1.0, 5, None], [-0.25, 6, "x"]],
    },
}


def test_a_reply_becomes_aligned_arrays():
    got = parse_generation(REPLY, server="s")
    assert got.token_ids.tolist() == [4, 5, 6]
    assert got.logprobs.tolist() == [-0.5, -1.0, -0.25]
    assert got.versions.tolist() == [7, 7, 8]
    assert (got.token_ids.dtype, got.logprobs.dtype, got.versions.dtype) == (np.int32, np.float32, np.int32)
    assert got.finish_reason == "length"


def test_an_abort_in_the_queue_has_no_tokens():
    reply = {
        "output_ids": [],
        "meta_info": {"id": "r", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
    }
    assert len(parse_generation(reply, server="s").token_ids) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["output_ids"].append(9), "do not cover"),
        (lambda r: r["output_ids"].__setitem__(0, 9), "other"),
        (lambda r: r["meta_info"]["output_token_logprobs"].pop(), "log-probabilities of 2"),
        (lambda r: r["meta_info"].pop("output_token_logprobs"), "log-probabilities of 0"),
        (lambda r: r["meta_info"].pop("finish_reason"), "finish_reason"),
        (lambda r: r["meta_info"]["finish_reason"].update(type="tired"), "tired"),
        (lambda r: r["meta_info"]["output_token_logprobs"].__setitem__(0, [float("nan"), 4, None]), "finite"),
        (lambda r: r["meta_info"]["output_token_logprobs"].__setitem__(0, [0.5, 4, None]), "below zero"),
        (lambda r: r["meta_info"]["output_token_logprobs"].__setitem__(0, [None, 4, None]), "cannot be read"),
        (lambda r: r["meta_info"]["weight_versions"][0].update(version="default"), "no published weights"),
        (lambda r: r["meta_info"]["weight_versions"][0].update(start=1), "do not cover"),
        (lambda r: r["meta_info"].pop("weight_versions"), "do not cover"),
        (lambda r: r.pop("meta_info"), "meta_info"),
    ],
)
def test_a_reply_that_contradicts_itself_is_refused(change, message):
    reply = copy.deepcopy(REPLY)
    change(reply)
    with pytest.raises(ServerError, match=message):
        parse_generation(reply, server="s")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=6))
def test_spans_give_every_token_its_version(runs):
    spans, expected = [], []
    for version, length in runs:
        spans.append({"version": str(version), "start": len(expected), "end": len(expected) + length})
        expected += [version] * length
    assert parse_versions(spans, num_tokens=len(expected), server="s").tolist() == expected
    with pytest.raises(ServerError):
        parse_versions(spans, num_tokens=len(expected) + 1, server="s")


@pytest.mark.parametrize("reply", [None, [], {}, {"loads": [{}]}, {"loads": 3}])
def test_unreadable_answers_name_the_server(reply):
    for parse in (parse_load, parse_model_info):
        with pytest.raises(ServerError, match="http://x"):
            parse(reply, server="http://x")


def test_unpublished_weights_have_no_version():
    assert parse_model_info({"model_path": "m", "weight_version": "default"}, server="s").version is None
    assert parse_model_info({"model_path": "m", "weight_version": "12"}, server="s").version == 12


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": "flat"}, "flat"),
        ({"error": {"message": "nested"}}, "nested"),
        ({"object": "error", "message": "openai"}, "openai"),
        ({"success": False, "message": "update"}, "update"),
        ({}, None),
        ("text", None),
    ],
)
def test_error_messages_are_found_in_all_shapes(body, message):
    assert error_message(body) == message


def test_a_refusal_is_a_server_error_with_its_status():
    assert RequestRefused("no", status=400).status == 400
    assert issubclass(RequestRefused, ServerError)


def test_options_are_written_as_command_lines_read_them():
    values = {
        "dtype": "bfloat16",
        "enable_metrics": True,
        "disable_radix_cache": False,
        "tp_size": 2,
        "cuda_graph_bs": [1, 8],
        "seed": None,
    }
    assert as_options(values) == [
        "--dtype",
        "bfloat16",
        "--enable-metrics",
        "--tp-size",
        "2",
        "--cuda-graph-bs",
        "1",
        "8",
    ]


# ---------------------------------------------------------------------------------------------- process group


@given(
    st.lists(
        st.tuples(st.sampled_from(["float32", "bfloat16", "int64"]), st.lists(st.integers(1, 3), max_size=3)),
        min_size=1,
        max_size=5,
    )
)
def test_a_bucket_returns_what_went_in(specs):
    tensors = [torch.randn(shape).to(getattr(torch, dtype)) for dtype, shape in specs]
    flat = flatten(tensors)
    back = unflatten(flat, [(t.dtype, tuple(t.shape)) for t in tensors])
    assert flat.numel() == sum(t.numel() * t.element_size() for t in tensors)
    assert all(torch.equal(a, b) and a.shape == b.shape for a, b in zip(tensors, back, strict=True))
    with pytest.raises(ValueError, match="bytes"):
        unflatten(flat[:-1], [(t.dtype, tuple(t.shape)) for t in tensors])


def test_a_group_whose_first_rank_never_comes_is_an_error():
    port = reserved_port()
    with pytest.raises(InfrastructureError, match="could not join"):
        join_weights_group(
            address="127.0.0.1", port=port, rank=1, world_size=2, name="g", backend="gloo", timeout_s=0.5
        )


def test_a_group_of_one_broadcasts_and_can_be_made_again():
    for _ in range(2):
        port = reserved_port()
        group = join_weights_group(
            address="127.0.0.1", port=port, rank=0, world_size=1, name="alone", backend="gloo", timeout_s=30
        )
        tensor = torch.arange(3.0)
        broadcast(tensor, group)
        assert tensor.tolist() == [0.0, 1.0, 2.0]
        leave_weights_group(group)
