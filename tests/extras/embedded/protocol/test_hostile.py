"""The embedded server against whoever reaches it: no request, folder or leaving client ends it, blocks it, or
changes half of it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from agentrl.config.rollout import EmbeddedServerConfig
from agentrl.errors import RequestRefused
from agentrl.extras.embedded.groups import MAX_JOINS
from agentrl.extras.embedded.launch import EmbeddedServer
from agentrl.http.client import HttpClient
from agentrl.servers.supervisor import Supervisor
from agentrl.types import SamplingParams
from extras.embedded.protocol.conftest import Server, embedded, run_with

GREEDY = SamplingParams(4, temperature=0.0)
HUGE = 2**63
ENDS = ("/continue_generation", "/resume_memory_occupation", "/end_weight_update")
"""Of what makes generations wait."""
DEEP = "(nested deeply)"
"""Stands for what no encoder writes; a parser reads it."""


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "server.log"


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path], log_file: Path) -> Iterator[Server]:
    """A server of its own: what is done to it here must not be forgiven by a restart."""
    launcher = EmbeddedServer(EmbeddedServerConfig(num_blocks=24, page_size=16), "float32")
    supervisor = Supervisor(launcher, log_file=log_file, start_timeout_s=240, max_restarts=0)
    try:
        yield Server(supervisor.start(str(models[0]), "0"), *models, embedded()[1])
    finally:
        supervisor.stop()


@pytest.fixture(autouse=True)
def is_unharmed(server: Server, log_file: Path) -> Iterator[None]:
    """Whatever a test did, the same tokens of the same weights come afterwards, and nothing was
    unforeseen.
    """
    before = state_of(server)
    yield
    assert state_of(server) == before
    assert "Traceback" not in log_file.read_text(), log_file.read_text()[-3000:]


def state_of(server: Server) -> tuple[list[int], list[float], int, dict[str, str]]:
    async def script(client):
        for path in ENDS:
            with contextlib.suppress(RequestRefused):
                await client._call("POST", path, {})
        got = await client.generate([3, 5, 7], GREEDY, rid="after")
        info = await client.model_info()
        return (
            got.token_ids.tolist(),
            [round(value, 4) for value in got.logprobs.tolist()],
            info.version,
            dict(await client.checksums()),
        )

    return run_with(server, script)


def ask(server: Server, path: str, body: Any) -> httpx.Response:
    content = json.dumps(body).replace(json.dumps(DEEP), "[" * 1000 + "]" * 1000)
    return httpx.post(
        server.url + path, content=content, headers={"Content-Type": "application/json"}, timeout=120
    )


def message_of(reply: httpx.Response) -> str:
    assert reply.status_code == 400, (reply.status_code, reply.text[:300])
    answer = reply.json()
    error = answer.get("error") or answer
    message = error["message"] if isinstance(error, dict) else error
    assert len(message) < 1200, "a message shows a value, not all of it"
    return message


def sampling(**params: Any) -> dict[str, Any]:
    return {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2, **params}}


# --------------------------------------------------------------------------------------------------- requests

REQUESTS = {
    "top_k beyond 64 bits": ("/generate", sampling(top_k=HUGE)),
    "top_k beyond 32 bits": ("/generate", sampling(top_k=2**31)),
    "max_new_tokens": ("/generate", sampling(max_new_tokens=HUGE)),
    "deep prompt": ("/generate", {"input_ids": DEEP}),
    "deep parameters": ("/generate", {"input_ids": [3], "sampling_params": DEEP}),
    "deep stop ids": ("/generate", sampling(stop_token_ids=DEEP)),
    "deep rid": ("/generate", {"input_ids": [3], "rid": DEEP}),
    "long rid": ("/generate", {"input_ids": [3], "rid": "x" * 5000}),
    "too many prompts": ("/generate", {"input_ids": [[3]] * 1025}),
    "long path": ("/update_weights_from_disk", {"model_path": "x" * 5000}),
    "long name in a path": ("/update_weights_from_disk", {"model_path": "/tmp/" + "x" * 300}),
    "NUL in a path": ("/update_weights_from_disk", {"model_path": "/tmp/\0"}),
    "long adapter path": ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/tmp/" + "x" * 300}),
    "deep load_format": ("/update_weights_from_disk", {"model_path": "/tmp", "load_format": DEEP}),
    "deep mode": ("/pause_generation", {"mode": DEEP}),
    "deep action": ("/weights_checker", {"action": DEEP}),
    "flag of another type": ("/abort_request", {"abort_all": "yes"}),
    "shapes that are none": (
        "/update_weights_from_distributed",
        {"names": ["a"], "dtypes": ["float32"], "shapes": [["x"]]},
    ),
    "names that are none": (
        "/update_weights_from_distributed",
        {"names": [[]], "dtypes": ["float32"], "shapes": [[1]]},
    ),
    "a dtype that is none": (
        "/update_weights_from_distributed",
        {"names": ["a"], "dtypes": [{}], "shapes": [[1]]},
    ),
    "int8": (
        "/update_weights_from_distributed",
        {"names": ["model.norm.weight"], "dtypes": ["int8"], "shapes": [[32]]},
    ),
}
GROUP = {
    "master_address": "127.0.0.1",
    "master_port": 9,
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "g",
    "backend": "gloo",
}
GROUPS = {
    "an empty address": {"master_address": ""},
    "an address with a path": {"master_address": "127.0.0.1/x"},
    "port 0": {"master_port": 0},
    "a large port": {"master_port": 65536},
    "a huge port": {"master_port": HUGE},
    "the rank of the learner": {"rank_offset": 0},
    "a rank outside of the world": {"rank_offset": 2},
    "a huge world": {"world_size": HUGE},
    "an unknown backend": {"backend": "carrier pigeon"},
    "no backend of this machine": {"backend": "mpi"},
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_strange_value_is_refused_by_one_short_line(server, name):
    assert message_of(ask(server, *REQUESTS[name]))


@pytest.mark.parametrize("name", GROUPS)
def test_a_strange_group_is_refused_at_once(server, name):
    assert message_of(ask(server, "/init_weights_update_group", GROUP | GROUPS[name]))


def test_a_body_beyond_the_bound_is_refused(server):
    reply = ask(server, "/generate", {"input_ids": [3], "ignored": "x" * (33 * 2**20)})
    assert reply.status_code == 413


def test_as_many_prompts_as_are_let_through_are_answered(server):
    reply = ask(server, "/generate", {"input_ids": [[3]] * 1024, "sampling_params": {"max_new_tokens": 1}})
    assert (reply.status_code, len(reply.json())) == (200, 1024)


@pytest.mark.parametrize("temperature", [1e-6, 1e300])
def test_no_temperature_makes_logits_infinite(server, temperature):
    reply = ask(
        server, "/generate", sampling(temperature=temperature, top_p=1e-300, min_p=1.0, top_k=2**31 - 1)
    )
    assert (reply.status_code, len(reply.json()["output_ids"])) == (200, 2)


def test_web_pages_are_refused(server):
    """A page may post text without being asked about, and let its own name resolve to 127.0.0.1."""

    async def script(client):
        statuses = []
        body = {"model_path": str(server.other), "weight_version": "6"}
        for headers in (
            {"Origin": "https://page.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            async with HttpClient(server.url, headers=headers) as http:
                statuses.append((await http.request("POST", "/update_weights_from_disk", json=body)).status)
        for start in (
            "Host: page.example\r\nContent-Type: application/json",
            f"Host: {server.url[7:]}\r\nContent-Type: text/plain",
        ):
            content = json.dumps(body)
            head = f"{start}\r\nContent-Length: {len(content)}\r\nConnection: close"
            raw = f"POST /update_weights_from_disk HTTP/1.1\r\n{head}\r\n\r\n{content}"
            stream = await trio.open_tcp_stream("127.0.0.1", int(server.url.rpartition(":")[2]))
            await stream.send_all(raw.encode())
            statuses.append(int(b"".join([piece async for piece in stream]).split()[1]))
        return statuses

    assert run_with(server, script) == [403, 403, 403, 403, 415]


# ---------------------------------------------------------------------------------------------------- clients


def test_clients_that_leave_write_nothing_into_the_log(server, log_file):
    """Before the head, within the body, before the answer, with one prompt or several: 200 of them."""
    port = int(server.url.rpartition(":")[2])
    size = log_file.stat().st_size
    for index in range(200):
        prompts = [3, 4] if index % 2 else [[3], [4], [5]]
        content = json.dumps(
            {"input_ids": prompts, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
        )
        head = (
            "POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: "
            f"{len(content)}\r\n\r\n"
        )
        sent = (head + content).encode()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(sent[: [10, len(head), len(sent) - 1, len(sent), len(sent)][index % 5]])
    assert ask(server, "/generate", sampling()).status_code == 200
    assert log_file.stat().st_size == size


def test_joins_that_hang_hold_nothing_up(server):
    """Nobody listens where they are sent; a publish comes through meanwhile, and so does what is asked."""

    async def script(client):
        refused = []
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            port = silent.getsockname()[1]

            async def join(index: int) -> None:
                try:
                    await client.init_weights_group(
                        address="127.0.0.1",
                        port=port,
                        rank_offset=1,
                        world_size=2,
                        name=f"g{index}",
                        backend="gloo",
                    )
                except RequestRefused as error:
                    refused.append(str(error))

            async with trio.open_nursery() as nursery:
                for index in range(12):
                    nursery.start_soon(join, index)
                while len(refused) < 12 - MAX_JOINS:
                    await trio.sleep(0.01)
                with trio.fail_after(60):
                    for folder, version in ((server.other, 7), (server.model, 0)):
                        await client.update_weights_from_disk(str(folder), version=version, flush_cache=True)
                    await client.generate([3], GREEDY, rid="meanwhile")
                nursery.cancel_scope.cancel()
        return refused

    refused = run_with(server, script)
    assert len(refused) == 12 - MAX_JOINS
    assert all(f"this server takes {MAX_JOINS}" in text for text in refused)


# ---------------------------------------------------------------------------------------------------- folders


def changed(source: Path, folder: Path, change) -> str:
    """Write a copy of the model `source` whose tensors `change` has edited; return its path."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def times(factor: float):
    return lambda tensors: {name: tensor * factor for name, tensor in tensors.items()}


BROKEN = {
    "finite weights that overflow": (times(1e30), "forward of these weights is not finite"),
    "infinities": (times(float("inf")), "not finite"),
    "int8": (
        lambda tensors: {name: tensor.to(torch.int8) for name, tensor in tensors.items()},
        "is of torch.int8",
    ),
    "one tensor in int8": (
        lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"].to(torch.int8)},
        "int8",
    ),
    "float64 beyond float32": (
        lambda tensors: {name: tensor.double() * 1e300 for name, tensor in tensors.items()},
        "not finite",
    ),
    "booleans": (lambda tensors: {name: tensor > 0 for name, tensor in tensors.items()}, "is of torch.bool"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_weights_that_cannot_be_sampled_from_are_refused_and_the_old_ones_kept(server, tmp_path, name):
    change, message = BROKEN[name]
    body = {"model_path": changed(server.model, tmp_path / "weights", change), "weight_version": "9"}
    assert message in message_of(ask(server, "/update_weights_from_disk", body))


NAMES = {
    "not JSON": "{",
    "no name": "{}",
    "a list": "[]",
    "another type": '{"weights_name": []}',
    "deep": "[" * 5000,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_names_file_beside_good_weights_changes_nothing(server, tmp_path, name):
    folder = Path(shutil.copytree(server.other, tmp_path / "weights"))
    (folder / "weights_name.json").write_text(NAMES[name])
    assert "weights_name.json" in message_of(
        ask(server, "/update_weights_from_disk", {"model_path": str(folder), "weight_version": "9"})
    )


INDEXES = {
    "not JSON": "{oh",
    "a list": "[]",
    "no map": "{}",
    "another map": '{"weight_map": [1]}',
    "no names of files": '{"weight_map": {"a": 1}}',
    "a file that is missing": '{"weight_map": {"a": "missing.safetensors"}}',
    "a file elsewhere": '{"weight_map": {"a": "../model/model.safetensors"}}',
    "an absolute path": '{"weight_map": {"a": "/etc/passwd"}}',
    "deep": '{"weight_map": ' + "[" * 5000,
}


@pytest.mark.parametrize("name", INDEXES)
def test_a_broken_index_is_refused(server, tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(INDEXES[name])
    assert message_of(ask(server, "/update_weights_from_disk", {"model_path": str(tmp_path)}))


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}", b"\x10\0\0\0\0\0\0\0" + b"[" * 16]
)
@pytest.mark.parametrize("name", ["model.safetensors", "changes.safetensors"])
def test_a_file_that_is_no_safetensors_is_refused(server, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    body = {"model_path": str(tmp_path), "load_format": "auto" if name.startswith("model") else "changes"}
    assert message_of(ask(server, "/update_weights_from_disk", body))


LAYER = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
ADAPTERS = {
    "alpha NaN": ('{"r": 2, "lora_alpha": NaN}', 1.0, "must be a finite number"),
    "alpha infinite": ('{"r": 2, "lora_alpha": Infinity}', 1.0, "must be a finite number"),
    "alpha that overflows": ('{"r": 2, "lora_alpha": 1e38}', 1e3, "forward with this adapter is not finite"),
    "values that overflow": ('{"r": 2, "lora_alpha": 2}', 1e25, "forward with this adapter is not finite"),
    "rank infinite": ('{"r": Infinity, "lora_alpha": 2}', 1.0, "cannot be read"),
    "rank 0": ('{"r": 0, "lora_alpha": 2}', 1.0, "rank 0"),
    "rank huge": ('{"r": 9223372036854775808, "lora_alpha": 2}', 1.0, "rank 9223372036854775808"),
    "a list": ("[]", 1.0, "cannot be read"),
    "deep": ("[" * 100_000, 1.0, "cannot be read"),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_broken_adapter_is_refused_and_the_base_samples_on(server, tmp_path, name):
    config, factor, message = ADAPTERS[name]
    (tmp_path / "adapter_config.json").write_text(config)
    halves = {LAYER.format("A"): torch.full((2, 32), factor), LAYER.format("B"): torch.full((32, 2), factor)}
    save_file(halves, tmp_path / "adapter_model.safetensors")
    assert message in message_of(
        ask(server, "/load_lora_adapter", {"lora_name": "a", "lora_path": str(tmp_path)})
    )


@pytest.mark.parametrize(
    "halves",
    [
        {"A": torch.zeros(2, 32, dtype=torch.int8), "B": torch.zeros(32, 2)},
        {"A": torch.zeros(2), "B": torch.zeros(32, 2)},
        {"A": torch.tensor(1.0), "B": torch.tensor(1.0)},
        {"A": torch.zeros(2, 32)},
    ],
)
def test_an_adapter_of_strange_tensors_is_refused(server, tmp_path, halves):
    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 2}')
    save_file(
        {LAYER.format(half): tensor for half, tensor in halves.items()},
        tmp_path / "adapter_model.safetensors",
    )
    assert message_of(ask(server, "/load_lora_adapter", {"lora_name": "a", "lora_path": str(tmp_path)}))


# ------------------------------------------------------------------------------------------------------- fuzz

FIELDS = {
    "/generate": (
        "input_ids",
        "rid",
        "sampling_params",
        "return_logprob",
        "lora_path",
        "text",
        "stream",
        "logprob_start_len",
    ),
    "/abort_request": ("rid", "abort_all"),
    "/pause_generation": ("mode",),
    "/continue_generation": (),
    "/release_memory_occupation": ("tags",),
    "/resume_memory_occupation": ("tags",),
    "/weights_checker": ("action",),
    "/update_weights_from_disk": (
        "model_path",
        "weight_version",
        "load_format",
        "abort_all_requests",
        "flush_cache",
    ),
    "/load_lora_adapter": ("lora_name", "lora_path"),
    "/unload_lora_adapter": ("lora_name",),
    "/begin_weight_update": ("staged",),
    "/end_weight_update": (),
    "/update_weights_from_distributed": (
        "names",
        "dtypes",
        "shapes",
        "group_name",
        "weight_version",
        "load_format",
    ),
    "/update_weights_from_tensor": ("serialized_named_tensors",),
    "/init_weights_update_group": tuple(GROUP),
    "/destroy_weights_update_group": ("group_name",),
    "/update_weight_version": ("abort_all_requests",),  # without new_version, it renames nothing
    "/flush_cache": ("timeout",),
}
PARAMS = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "n",
    "seed",
)
numbers = st.one_of(st.integers(-3, 9), st.sampled_from([HUGE, -HUGE, 2**31, 2**32, 1e308, 1e-308, 0.5]))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.text(max_size=8),
    st.sampled_from(["a/../..", "/dev/zero", "/proc/self/mem", "."]),
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
params = st.dictionaries(st.sampled_from(PARAMS), values, max_size=4)
prompts = st.one_of(values, st.lists(st.integers(0, 383), min_size=1, max_size=5))


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Any]:
    """A route with any JSON, or with any JSON in its own fields."""
    path = draw(st.sampled_from(sorted(FIELDS)))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(values)
    own = {name: draw(values) for name in FIELDS[path] if draw(st.booleans())}
    if path == "/generate":
        own |= {"input_ids": draw(prompts), "sampling_params": draw(st.one_of(params, values))}
    return path, own


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(calls(), min_size=40, max_size=40))
def test_no_json_at_any_field_fails_or_ends_it(server, sequence):
    async def script(client):
        async with HttpClient(server.url) as http:
            for path, body in sequence:
                with trio.move_on_after(2.0):  # a join that waits for its learner is left alone
                    reply = await http.request("POST", path, json=body)
                    assert reply.status in (200, 400), (path, body, reply.status, reply.body[:300])
                for end in ENDS:
                    await http.request("POST", end, json={})

    run_with(server, script)
    state_of(server)
