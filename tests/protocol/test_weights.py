"""New weights: by disk and by process group, their versions on every token, and what an update refuses."""

import socket
import sys

import numpy as np
import pytest
import torch
import trio
from safetensors.torch import load_file, save_file

from agentrl.errors import RequestRefused
from agentrl.sglang.process_group import tensor_checksum
from agentrl.types import SamplingParams, TensorSpec

PROMPT = [5, 17, 42]
GREEDY = SamplingParams(10, temperature=0.0)

TRAINER = """
import sys
from safetensors.torch import load_file
from agentrl.sglang.process_group import broadcast, flatten, join_weights_group, leave_weights_group
port, folder, load_format = int(sys.argv[1]), sys.argv[2], sys.argv[3]
group = join_weights_group(address="127.0.0.1", port=port, rank=0, world_size=2, name="g", backend="gloo", timeout_s=60)
tensors = list(load_file(folder + "/model.safetensors").values())
for tensor in [flatten(tensors)] if load_format == "flattened_bucket" else tensors:
    broadcast(tensor, group)
print("sent", flush=True)
leave_weights_group(group)
"""


def specs_of(folder):
    tensors = load_file(folder / "model.safetensors")
    return [
        TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape), t.numel() * t.element_size()) for name, t in tensors.items()
    ]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_disk_update_changes_the_next_tokens_and_their_version(server, talk, logprobs_of):
    async def script(client):
        before = await client.generate(PROMPT, GREEDY, rid="before")
        await client.pause("abort")
        await client.update_weights_from_disk(str(server.other), version=7, flush_cache=True)
        await client.resume()
        return before, await client.generate(PROMPT, GREEDY, rid="after"), await client.model_info()

    before, after, info = talk(script)
    assert before.token_ids.tolist() != after.token_ids.tolist()
    np.testing.assert_allclose(after.logprobs, logprobs_of(server.other, PROMPT, after.token_ids.tolist()), atol=1e-4)
    assert set(before.versions) == {0}
    assert set(after.versions) == {7}
    assert info.version == 7


def test_a_generation_across_an_update_is_continued_with_exact_versions(server, talk, logprobs_of):
    """What the client of a run does: take the partial output, send it again as part of the prompt."""
    params = SamplingParams(300, temperature=1.0)

    async def script(client):
        parts = []

        async def play():
            ids = list(PROMPT)
            while not parts or parts[-1].finish_reason == "abort":
                parts.append(await client.generate(ids, SamplingParams(303 - len(ids), temperature=1.0), rid="same-rid"))
                ids += parts[-1].token_ids.tolist()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(play)
            while not (await client.loads()).num_used_tokens > len(PROMPT) + 5:
                await trio.sleep(0.005)
            await client.pause("abort")
            await client.update_weights_from_disk(str(server.other), version=1, flush_cache=True)
            await client.resume()
        return parts

    first, second = talk(script)
    assert params.max_new_tokens >= len(first.token_ids) + len(second.token_ids)
    assert set(first.versions) == {0}
    assert set(second.versions) == {1}
    prefix = PROMPT + first.token_ids.tolist()
    np.testing.assert_allclose(first.logprobs, logprobs_of(server.model, PROMPT, first.token_ids.tolist()), atol=1e-4)
    np.testing.assert_allclose(second.logprobs, logprobs_of(server.other, prefix, second.token_ids.tolist()), atol=1e-4)


def test_an_update_without_a_pause_waits_for_what_runs(server, talk):
    async def script(client):
        done = []

        async def one():
            done.append(await client.generate(PROMPT, SamplingParams(200, temperature=0.0), rid="runs"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            while not (await client.loads()).num_running:
                await trio.sleep(0.005)
            await client.update_weights_from_disk(str(server.other), version=3, flush_cache=True)
        return done[0]

    generation = talk(script)
    assert generation.finish_reason != "abort"
    assert set(generation.versions) == {0}


@pytest.mark.parametrize("load_format", ["flattened_bucket", None])
def test_distributed_update_from_a_trainer_process(server, talk, spawn, logprobs_of, load_format):
    port = free_port()
    specs = specs_of(server.other)

    async def script(client):
        trainer = spawn([sys.executable, "-c", TRAINER, str(port), str(server.other), str(load_format)])
        await client.init_weights_group(address="127.0.0.1", port=port, rank_offset=1, world_size=2, name="g", backend="gloo")
        await client.pause("abort")
        await client.begin_weight_update()
        if load_format:
            await client.update_weights_from_distributed(specs, group="g", version=9, flush_cache=True)
        else:
            body = {"names": [s.name for s in specs], "dtypes": [s.dtype for s in specs], "shapes": [s.shape for s in specs]}
            await client._update("/update_weights_from_distributed", body | {"group_name": "g", "weight_version": "9"})
        await client.end_weight_update()
        await client.resume()
        await client.destroy_weights_group("g")
        with pytest.raises(RequestRefused, match="does not exist"):
            await client.destroy_weights_group("g")
        await trio.to_thread.run_sync(trainer.wait)
        return await client.generate(PROMPT, GREEDY, rid="after")

    after = talk(script)
    np.testing.assert_allclose(after.logprobs, logprobs_of(server.other, PROMPT, after.token_ids.tolist()), atol=1e-4)
    assert set(after.versions) == {9}


def test_distributed_update_needs_a_session_and_a_group(server, talk):
    specs = specs_of(server.other)

    async def script(client):
        with pytest.raises(RequestRefused, match="begin_weight_update"):
            await client.update_weights_from_distributed(specs, group="zz", version=1, flush_cache=True)
        await client.begin_weight_update()
        with pytest.raises(RequestRefused, match="zz"):
            await client.update_weights_from_distributed(specs, group="zz", version=1, flush_cache=True)
        await client.end_weight_update()
        return await client.model_info()

    assert talk(script).version == 0


def test_checksums_tell_weights_apart(server, talk):
    async def script(client):
        first = await client.checksums()
        await client.update_weights_from_disk(str(server.other), version=1, flush_cache=True)
        second = await client.checksums()
        await client.update_weights_from_disk(str(server.model), version=2, flush_cache=True)
        return first, second, await client.checksums()

    first, second, again = talk(script)
    assert first == again
    assert first.keys() == second.keys()
    assert all(first[name] != second[name] for name in first if "norm" not in name and "bias" not in name)
    if server.capabilities.checksums_by_hf_name:
        tensors = load_file(server.other / "model.safetensors")
        assert {name: tensor_checksum(t) for name, t in tensors.items()}.items() <= second.items()


def test_renaming_the_version_during_a_generation_is_seen_per_token(talk):
    async def script(client):
        done = []

        async def one():
            done.append(await client.generate(PROMPT, SamplingParams(300, temperature=0.0), rid="x"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            while not (await client.loads()).num_used_tokens > len(PROMPT) + 5:
                await trio.sleep(0.005)
            await client.update_weight_version(5)
        return done[0]

    versions = talk(script).versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 5}


def test_a_missing_folder_is_refused(talk):
    async def script(client):
        with pytest.raises(RequestRefused) as caught:
            await client.update_weights_from_disk("/nowhere", version=1, flush_cache=True)
        assert caught.value.status == 400
        return await client.model_info()

    assert talk(script).version == 0


def spoil_name(tensors):
    tensors["model.unknown.weight"] = torch.zeros(3)


def spoil_shape(tensors):
    tensors["model.norm.weight"] = torch.zeros(3)


def spoil_missing(tensors):
    del tensors["model.norm.weight"]


def spoil_value(tensors):
    tensors["model.norm.weight"] = torch.full((32,), float("nan"))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(spoil_name, "model.unknown.weight"), (spoil_shape, "shape"), (spoil_missing, "missing"), (spoil_value, "finite")],
)
def test_weights_that_do_not_fit_change_nothing(server, talk, scratch, spoil, message):
    if not server.capabilities.refuses_foreign_weights:
        return
    tensors = {name: t + 1 for name, t in load_file(scratch / "model.safetensors").items()}
    spoil(tensors)
    save_file(tensors, scratch / "model.safetensors")

    async def script(client):
        before = await client.checksums()
        with pytest.raises(RequestRefused, match=message) as caught:
            await client.update_weights_from_disk(str(scratch), version=4, flush_cache=True)
        assert caught.value.status == 400
        assert await client.checksums() == before
        return await client.model_info()

    assert talk(script).version == 0


def test_half_a_file_is_refused(server, talk, scratch):
    file = scratch / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])

    async def script(client):
        with pytest.raises(RequestRefused):
            await client.update_weights_from_disk(str(scratch), version=4, flush_cache=True)
        return await client.model_info()

    assert talk(script).version == 0
